/* Writes values like `tojson`, and like Python's repr and str. Text written here has no origin. */

#include <math.h>
#include <stdio.h>

#include "values.h"

static void put_int(Machine *m, int64_t i) {
    char text[32];
    put(m, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)i));
}

/* The shortest digits that read back as the same float, and its decimal exponent. Of decimals with as many digits, the
 * nearest is tried: the right one but for powers of two, where one that is farther away may read back and it may not. */
static int shortest(double d, char *digits, int *exponent) {
    char text[64];
    for (int precision = 0; precision <= 16; precision++) {
        snprintf(text, sizeof text, "%.*e", precision, d);
        if (strtod(text, NULL) == d) break;
    }
    int n = 0;
    const char *p = text;
    for (; *p && *p != 'e'; p++)
        if (*p != '.') digits[n++] = *p;
    *exponent = *p ? atoi(p + 1) : 0;
    while (n > 1 && digits[n - 1] == '0') n--;
    return n;
}

static void put_float(Machine *m, double d) { /* as repr does */
    if (!isfinite(d)) give_up(m, "a float that is not finite");
    char digits[32];
    int exponent, power;
    const int n = shortest(fabs(d), digits, &exponent);
    if (n > 15 && fabs(frexp(d, &power)) == 0.5) { /* the next float below is nearer than above: see `shortest` */
        const Value v = {.tag = FLOAT, .d = d}, text = by_python(m, "filter", "string", &v, 1);
        put(m, text.s, text.size);
        return;
    }
    if (signbit(d)) put_char(m, '-');
    if (exponent < -4 || exponent >= 16) {
        put_char(m, digits[0]);
        if (n > 1) put_char(m, '.');
        put(m, digits + 1, (size_t)(n - 1));
        char text[16];
        put(m, text, (size_t)snprintf(text, sizeof text, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent)));
    } else if (exponent < 0) {
        PUT(m, "0.");
        for (int i = -1; i > exponent; i--) put_char(m, '0');
        put(m, digits, (size_t)n);
    } else {
        for (int i = 0; i <= exponent; i++) put_char(m, i < n ? digits[i] : '0');
        put_char(m, '.');
        if (n > exponent + 1)
            put(m, digits + exponent + 1, (size_t)(n - exponent - 1));
        else
            put_char(m, '0');
    }
}

static void put_escape(Machine *m, const char *format, uint32_t c) {
    char text[16];
    put(m, text, (size_t)snprintf(text, sizeof text, format, c));
}

/* ---- repr and str */

static void put_quoted(Machine *m, Value s) {
    const char quote = memchr(s.s, '\'', s.size) && !memchr(s.s, '"', s.size) ? '"' : '\'';
    put_char(m, quote);
    int size;
    for (size_t i = 0; i < s.size; i += (size_t)size) {
        const uint32_t c = decode(s.s + i, &size);
        if (c == (uint32_t)quote || c == '\\') {
            put_char(m, '\\');
            put_char(m, (char)c);
        } else if (c == '\n') {
            PUT(m, "\\n");
        } else if (c == '\r') {
            PUT(m, "\\r");
        } else if (c == '\t') {
            PUT(m, "\\t");
        } else if (is_printable(m, c)) {
            put(m, s.s + i, (size_t)size);
        } else {
            put_escape(m, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
        }
    }
    put_char(m, quote);
}

static void put_plain_repr(Machine *m, Value v, int depth);

static void put_list_repr(Machine *m, const List *list, int depth) {
    if (list->kind > TUPLE) give_up(m, "repr of a range or view");
    put_char(m, list->kind == TUPLE ? '(' : '[');
    for (uint32_t i = 0; i < list->n; i++) {
        if (i) PUT(m, ", ");
        put_repr(m, list->v[i], depth + 1);
    }
    if (list->kind == TUPLE && list->n == 1) put_char(m, ',');
    put_char(m, list->kind == TUPLE ? ')' : ']');
}

void put_repr(Machine *m, Value v, int depth) {
    if (depth > MAX_DEPTH) give_up(m, "values nested too deeply");
    const size_t start = m->out.n;
    const uint32_t label = begin_label(m, v);
    put_plain_repr(m, v, depth);
    end_label(m, start, label);
}

static void put_plain_repr(Machine *m, Value v, int depth) {
    switch (v.tag) {
    case NONE: PUT(m, "None"); break;
    case BOOL:
        if (v.i)
            PUT(m, "True");
        else
            PUT(m, "False");
        break;
    case INT: put_int(m, v.i); break;
    case BIG: put(m, v.s, v.size); break;
    case FLOAT: put_float(m, v.d); break;
    case STRING: put_quoted(m, no_markup(m, v)); break;
    case LIST: put_list_repr(m, v.list, depth); break;
    case DICT:
        put_char(m, '{');
        for (uint32_t i = 0; i < v.dict->n; i++) {
            if (i) PUT(m, ", ");
            put_repr(m, v.dict->e[i].key, depth + 1);
            PUT(m, ": ");
            put_repr(m, v.dict->e[i].value, depth + 1);
        }
        put_char(m, '}');
        break;
    default: give_up(m, "repr of an object");
    }
}

void put_value(Machine *m, Value v) {
    if (v.tag == STRING)
        put_traced(m, v.s, v.size);
    else if (v.tag != UNDEFINED)
        put_repr(m, v, 0);
}

void put_unowned(Machine *m, Value v) {
    if (v.tag == STRING)
        put_labelled(m, v.s, v.size);
    else
        put_value(m, v);
}

void put_converted(Machine *m, const char *kind, const char *name, const Value *a, int n, Value v) {
    const Value text = by_python(m, kind, name, a, n);
    if (text.tag != STRING) give_up(m, "an operation that gives no text");
    const size_t start = m->out.n;
    const uint32_t label = begin_label(m, v);
    put(m, text.s, text.size);
    end_label(m, start, label);
}

Value to_text(Machine *m, Value v) {
    if (v.tag == STRING) return v;
    if (v.tag == UNDEFINED) return LITERAL("");
    const size_t mark = m->out.n;
    put_repr(m, v, 0);
    return take_output(m, mark);
}

/* ---- JSON */

static void put_ascii(Machine *m, const char *p, const char *end) {
    int size;
    for (; p < end; p += size) {
        const uint32_t c = decode(p, &size);
        if (c < 0x7f) {
            put_char(m, (char)c);
        } else if (c < 0x10000) {
            put_escape(m, "\\u%04x", c); /* DEL is escaped too */
        } else {
            put_escape(m, "\\u%04x", 0xD800 + ((c - 0x10000) >> 10));
            put_escape(m, "\\u%04x", 0xDC00 + ((c - 0x10000) & 1023));
        }
    }
}

static void put_json_string(Machine *m, Value s, bool ascii) {
    const char *p = s.s, *end = s.s + s.size;
    put_char(m, '"');
    while (p < end) {
        bool high = false;
        const char *q = scan_string(p, end, &high);
        if (ascii)
            put_ascii(m, p, q);
        else
            put(m, p, (size_t)(q - p));
        if (q == end) break;
        static const char *const plain = "\"\\\b\f\n\r\t", *const escaped = "\"\\bfnrt";
        const char *found = *q ? strchr(plain, *q) : NULL;
        if (found) {
            put_char(m, '\\');
            put_char(m, escaped[found - plain]);
        } else {
            put_escape(m, "\\u%04x", (unsigned char)*q);
        }
        p = q + 1;
    }
    put_char(m, '"');
}

static void new_line(Machine *m, const JsonStyle *style, int level) {
    if (!style->indented) return;
    put_char(m, '\n');
    for (int i = 0; i < level; i++) put(m, style->indent.s, style->indent.size);
}

static const Entry *sorted_entries(Machine *m, const Dict *d) {
    Entry *e = arena(m, d->n * sizeof(Entry));
    Value *keys = arena(m, d->n * sizeof(Value));
    for (uint32_t i = 0; i < d->n; i++) keys[i] = d->e[i].key;
    const uint32_t *places = sorted_places(m, keys, d->n, false, false);
    for (uint32_t i = 0; i < d->n; i++) e[i] = d->e[places[i]];
    return e;
}

static void put_object(Machine *m, const Dict *d, const JsonStyle *style, int level) {
    for (uint32_t i = 0; i < d->n; i++)
        if (d->e[i].key.tag != STRING) give_up(m, "tojson of other keys than strings");
    const Entry *e = style->sorted ? sorted_entries(m, d) : d->e;
    put_char(m, '{');
    for (uint32_t i = 0; i < d->n; i++) {
        if (i) put(m, style->between.s, style->between.size);
        new_line(m, style, level + 1);
        put_json(m, e[i].key, style, level);
        put(m, style->after_key.s, style->after_key.size);
        put_json(m, e[i].value, style, level + 1);
    }
    new_line(m, style, level);
    put_char(m, '}');
}

static void put_plain_json(Machine *m, Value v, const JsonStyle *style, int level) {
    switch (v.tag) {
    case NONE: PUT(m, "null"); break;
    case BOOL:
        if (v.i)
            PUT(m, "true");
        else
            PUT(m, "false");
        break;
    case INT: put_int(m, v.i); break;
    case BIG: put(m, v.s, v.size); break;
    case FLOAT: put_float(m, v.d); break;
    case STRING: put_json_string(m, v, style->ascii); break;
    case LIST:
        if (v.list->kind > TUPLE) give_up(m, "tojson of a range or view");
        if (!v.list->n) {
            PUT(m, "[]");
            break;
        }
        put_char(m, '[');
        for (uint32_t i = 0; i < v.list->n; i++) {
            if (i) put(m, style->between.s, style->between.size);
            new_line(m, style, level + 1);
            put_json(m, v.list->v[i], style, level + 1);
        }
        new_line(m, style, level);
        put_char(m, ']');
        break;
    case DICT:
        if (v.dict->n)
            put_object(m, v.dict, style, level);
        else
            PUT(m, "{}");
        break;
    default: give_up(m, "tojson of an object");
    }
}

void put_json(Machine *m, Value v, const JsonStyle *style, int level) {
    if (level > MAX_DEPTH) give_up(m, "values nested too deeply");
    const size_t start = m->out.n;
    const uint32_t label = begin_label(m, v);
    put_plain_json(m, v, style, level);
    end_label(m, start, label);
}

Value dump_json(Machine *m, Value v) {
    const JsonStyle style = {.between = LITERAL(", "), .after_key = LITERAL(": ")};
    const size_t mark = m->out.n;
    put_json(m, v, &style, 0);
    return take_output(m, mark);
}
