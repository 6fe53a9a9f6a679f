/* Parses a row's JSON into values. Strings without escapes are slices of the row; others are decoded once.
 * Gives up on anything that Python's parsers treat specially (lone surrogates, floats of many digits). */

#include <math.h>

#include "values.h"

static void skip_space(Machine *m) {
    while (m->json < m->json_end && (*m->json == ' ' || *m->json == '\n' || *m->json == '\t' || *m->json == '\r'))
        m->json++;
}

static bool take(Machine *m, char c) {
    if (m->json >= m->json_end || *m->json != c) return false;
    m->json++;
    return true;
}

static void expect(Machine *m, char c) {
    if (!take(m, c)) give_up(m, "not JSON");
}

static int32_t hex4(const char *p) {
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const char c = p[i];
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* \uXXXX at p, possibly followed by its low surrogate. */
static const char *unicode_escape(Machine *m, const char *p, char **to) {
    const char *end = m->json_end;
    const int32_t first = end - p >= 6 ? hex4(p + 2) : -1;
    if (first < 0) give_up(m, "not JSON");
    uint32_t c = (uint32_t)first;
    p += 6;
    if (c >= 0xD800 && c < 0xE000) {
        const int32_t low = c < 0xDC00 && end - p >= 6 && p[0] == '\\' && p[1] == 'u' ? hex4(p + 2) : -1;
        if (low < 0xDC00 || low > 0xDFFF) give_up(m, "a lone surrogate");
        c = 0x10000 + ((c - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
        p += 6;
    }
    *to += encode(*to, c);
    return p;
}

static const char *escape(Machine *m, const char *p, char **to) {
    static const char *const names = "\"\\/bfnrt", *const meant = "\"\\/\b\f\n\r\t";
    if (*p != '\\' || m->json_end - p < 2) give_up(m, "not JSON");
    if (p[1] == 'u') return unicode_escape(m, p, to);
    const char *found = p[1] ? strchr(names, p[1]) : NULL;
    if (!found) give_up(m, "not JSON");
    *(*to)++ = meant[found - names];
    return p + 2;
}

static Value string(Machine *m) { /* after the opening quote */
    const char *s = m->json, *end = m->json_end;
    bool high = false;
    const char *p = scan_string(s, end, &high);
    Value found;
    if (p < end && *p == '"') {
        found = of_string(s, (size_t)(p - s));
    } else {
        char *start = m->decoded, *to = start; /* has room for the whole row, and decoding never lengthens text */
        for (;;) {
            memcpy(to, s, (size_t)(p - s));
            to += p - s;
            if (p >= end) give_up(m, "not JSON");
            if (*p == '"') break;
            s = escape(m, p, &to);
            p = s < end && *s == '\\' ? s : scan_string(s, end, &high);
        }
        m->decoded = to;
        found = of_string(start, (size_t)(to - start));
    }
    m->json = p + 1;
    if (high && !is_utf8(found.s, found.size)) give_up(m, "not UTF-8");
    return found;
}

static const char *digits(const char *p, const char *end) {
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p;
}

static Value integer(Machine *m, const char *s, const char *end) { /* beyond 64 bits it keeps its digits */
    int64_t value = 0;
    const bool is_negative = *s == '-';
    bool fits = true;
    for (const char *p = s + is_negative; p < end && fits; p++)
        fits = !__builtin_mul_overflow(value, 10, &value) &&
               !__builtin_add_overflow(value, is_negative ? '0' - *p : *p - '0', &value);
    if (fits) return of_int(value);
    if (end - s > MAX_DIGITS) give_up(m, "an integer of more than 4000 digits");
    Value found = of_string(s, (size_t)(end - s));
    found.tag = BIG;
    return found;
}

static Value number(Machine *m) {
    const char *s = m->json, *end = m->json_end, *p = s;
    if (p < end && *p == '-') p++;
    if (p >= end || *p < '0' || *p > '9') give_up(m, "not JSON");
    p = *p == '0' ? p + 1 : digits(p, end);
    bool is_float = false;
    if (p < end && *p == '.') {
        const char *fraction = digits(p + 1, end);
        if (fraction == p + 1) give_up(m, "not JSON");
        p = fraction;
        is_float = true;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        const char *exponent = p + 1 + (p + 1 < end && (p[1] == '+' || p[1] == '-'));
        p = digits(exponent, end);
        if (p == exponent) give_up(m, "not JSON");
        is_float = true;
    }
    m->json = p;
    if (!is_float) return integer(m, s, p);
    char copy[64];
    if (p - s > 60) give_up(m, "a float of more than 60 characters");
    memcpy(copy, s, (size_t)(p - s));
    copy[p - s] = 0;
    const Value found = {.tag = FLOAT, .d = strtod(copy, NULL)};
    if (isinf(found.d)) give_up(m, "a float beyond all bounds");
    return found;
}

static Value value(Machine *m, int depth, int32_t column);

/* Keep a key and its value; a repeated key keeps its first position and takes the last value. */
static void add_member(Machine *m, size_t base, int depth, Index **index, Value key, Value own) {
    const uint32_t n = (uint32_t)((m->parsed.n - base) / 2);
    const Entry *e = (const Entry *)(m->parsed.at + base);
    uint32_t at = 0, *place = NULL;
    if (n < MAX_LINEAR) {
        while (at < n && !(e[at].key.hash == key.hash && is_text(e[at].key, key.s, key.size))) at++;
    } else {
        if (!*index || is_full(*index, n + 1)) *index = index_of(m, e, n);
        place = place_of(m, *index, e, key);
        at = *place ? *place - 1 : n;
    }
    if (at < n) {
        if (depth == 0) give_up(m, "a repeated column");
        m->parsed.at[base + 2 * at + 1] = own;
        return;
    }
    if (place) *place = n + 1;
    APPEND(m, m->parsed, key);
    APPEND(m, m->parsed, own);
}

static Value object(Machine *m, int depth) {
    const size_t base = m->parsed.n;
    Index *index = NULL;
    skip_space(m);
    if (!take(m, '}')) {
        do {
            skip_space(m);
            expect(m, '"');
            const Value key = keyed(string(m));
            skip_space(m);
            expect(m, ':');
            const int32_t column = depth == 0 ? (int32_t)(m->parsed.n - base) / 2 : -1;
            const Value own = value(m, depth + 1, column);
            add_member(m, base, depth, &index, key, own);
            skip_space(m);
        } while (take(m, ','));
        expect(m, '}');
    }
    const uint32_t n = (uint32_t)((m->parsed.n - base) / 2);
    const Value found = of_dict(m, n);
    found.dict->n = n;
    if (n) memcpy(found.dict->e, m->parsed.at + base, n * sizeof(Entry));
    m->parsed.n = base;
    return found;
}

static Value array(Machine *m, int depth, int32_t column) {
    const size_t base = m->parsed.n;
    skip_space(m);
    if (!take(m, ']')) {
        do {
            const char *raw = m->json, *decoded = m->decoded;
            const Value own = value(m, depth + 1, -1);
            if (column >= 0) APPEND(m, m->sources, (Source){raw, m->json, decoded, m->decoded, column, -1});
            APPEND(m, m->parsed, own);
            skip_space(m);
        } while (take(m, ','));
        expect(m, ']');
    }
    const Value found = of_list(m, (uint32_t)(m->parsed.n - base), PLAIN_LIST);
    if (found.list->n) memcpy(found.list->v, m->parsed.at + base, found.list->n * sizeof(Value));
    m->parsed.n = base;
    return found;
}

static bool take_word(Machine *m, const char *word, size_t n) {
    if ((size_t)(m->json_end - m->json) < n || memcmp(m->json, word, n)) return false;
    m->json += n;
    return true;
}

/* `column`: the index of the row's column that this value belongs to, or -1. */
static Value value(Machine *m, int depth, int32_t column) {
    if (depth > MAX_DEPTH) give_up(m, "JSON nested too deeply");
    skip_space(m);
    if (take(m, '"')) return string(m);
    if (take(m, '{')) return object(m, depth);
    if (take(m, '[')) return array(m, depth, column);
    if (take_word(m, "true", 4)) return of_bool(true);
    if (take_word(m, "false", 5)) return of_bool(false);
    if (take_word(m, "null", 4)) return none();
    return number(m);
}

void json_begin(Machine *m, const char *row, size_t n) {
    if (m->decoded_capacity < n + 8) {
        free(m->decoded_start);
        m->decoded_capacity = 0;
        m->decoded_start = malloc(2 * n + 64);
        if (!m->decoded_start) give_up(m, "out of memory");
        m->decoded_capacity = 2 * n + 64;
    }
    m->decoded = m->decoded_start;
    m->row_start = m->json = row;
    m->json_end = row + n;
    m->sources.n = m->parsed.n = 0;
}

Value json_row(Machine *m) {
    const Value row = value(m, 0, -1);
    skip_space(m);
    if (m->json != m->json_end) give_up(m, "not JSON");
    return row;
}

Value json_text(Machine *m, Value text, int32_t message) {
    const char *json = m->json, *end = m->json_end;
    char *decoded = m->decoded;
    m->decoded = arena(m, text.size + 8);
    add_origin(m, m->decoded, text.size, message, false);
    m->json = text.s;
    m->json_end = text.s + text.size;
    const Value found = value(m, 1, -1);
    skip_space(m);
    if (m->json != m->json_end) give_up(m, "not JSON");
    m->json = json;
    m->json_end = end;
    m->decoded = decoded;
    return found;
}
