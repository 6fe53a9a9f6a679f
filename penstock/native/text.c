/* Text with the semantics of Python's str, on UTF-8. Positions that templates see count code points. */

#include "values.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* ---- UTF-8 */

uint32_t decode(const char *p, int *size) {
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) {
        *size = 1;
        return s[0];
    }
    if (s[0] < 0xE0) {
        *size = 2;
        return (uint32_t)(s[0] & 31) << 6 | (s[1] & 63);
    }
    if (s[0] < 0xF0) {
        *size = 3;
        return (uint32_t)(s[0] & 15) << 12 | (uint32_t)(s[1] & 63) << 6 | (s[2] & 63);
    }
    *size = 4;
    return (uint32_t)(s[0] & 7) << 18 | (uint32_t)(s[1] & 63) << 12 | (uint32_t)(s[2] & 63) << 6 | (s[3] & 63);
}

int encode(char *p, uint32_t c) {
    if (c < 0x80) {
        p[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        p[0] = (char)(0xC0 | c >> 6);
        p[1] = (char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        p[0] = (char)(0xE0 | c >> 12);
        p[1] = (char)(0x80 | (c >> 6 & 63));
        p[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    p[0] = (char)(0xF0 | c >> 18);
    p[1] = (char)(0x80 | (c >> 12 & 63));
    p[2] = (char)(0x80 | (c >> 6 & 63));
    p[3] = (char)(0x80 | (c & 63));
    return 4;
}

static bool follows(const unsigned char *s, int n) {
    for (int i = 1; i <= n; i++)
        if ((s[i] & 0xC0) != 0x80) return false;
    return true;
}

/* The length of the ASCII prefix, in steps of a few bytes. */
size_t ascii_prefix(const char *s, size_t n) {
    size_t i = 0;
#if defined(__SSE2__)
    for (; i + 16 <= n; i += 16)
        if (_mm_movemask_epi8(_mm_loadu_si128((const __m128i *)(s + i)))) break;
#else
    for (uint64_t word; i + 8 <= n; i += 8) {
        memcpy(&word, s + i, 8);
        if (word & 0x8080808080808080u) break;
    }
#endif
    return i;
}

bool is_utf8(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text, *end = s + n;
    while (s < end) {
        const unsigned c = *s;
        const ptrdiff_t left = end - s;
        if (c < 0x80) {
            s++;
            s += ascii_prefix((const char *)s, (size_t)(end - s));
        } else if (c >= 0xC2 && c <= 0xDF) {
            if (left < 2 || !follows(s, 1)) return false;
            s += 2;
        } else if (c >= 0xE0 && c <= 0xEF) {
            if (left < 3 || !follows(s, 2) || (c == 0xE0 && s[1] < 0xA0) || (c == 0xED && s[1] > 0x9F)) return false;
            s += 3;
        } else if (c >= 0xF0 && c <= 0xF4) {
            if (left < 4 || !follows(s, 3) || (c == 0xF0 && s[1] < 0x90) || (c == 0xF4 && s[1] > 0x8F)) return false;
            s += 4;
        } else {
            return false;
        }
    }
    return true;
}

bool is_ascii(const char *s, size_t n) {
    for (size_t i = ascii_prefix(s, n); i < n; i++)
        if (s[i] & 0x80) return false;
    return true;
}

size_t count_points(const char *s, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += (s[i] & 0xC0) != 0x80;
    return count;
}

size_t point_offset(const char *s, size_t n, size_t index) {
    size_t i = 0;
    for (; i < n && index; index--) {
        i++;
        while (i < n && (s[i] & 0xC0) == 0x80) i++;
    }
    return i;
}

/* ---- searches */

const char *find(Machine *m, const char *text, size_t n, const char *wanted, size_t size) {
    if (size == 0) return text;
    if (n < size) return NULL;
    const char *p = text, *last = text + n - size;
#if defined(__SSE2__)
    const __m128i head = _mm_set1_epi8(wanted[0]), tail = _mm_set1_epi8(wanted[size - 1]);
    for (; last - p >= 15; p += 16) {
        const __m128i heads = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)p), head);
        const __m128i tails = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(p + size - 1)), tail);
        for (unsigned bits = (unsigned)_mm_movemask_epi8(_mm_and_si128(heads, tails)); bits; bits &= bits - 1) {
            const int i = __builtin_ctz(bits);
            charge(m, size);
            if (!memcmp(p + i, wanted, size)) return p + i;
        }
    }
#endif
    for (; p <= last; p++) {
        p = memchr(p, wanted[0], (size_t)(last - p) + 1);
        if (!p) return NULL;
        charge(m, size);
        if (!memcmp(p, wanted, size)) return p;
    }
    return NULL;
}

const char *scan_string(const char *p, const char *end, bool *high) {
#if defined(__SSE2__)
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), control = _mm_set1_epi8(0x1f);
    for (; end - p >= 16; p += 16) {
        const __m128i x = _mm_loadu_si128((const __m128i *)p);
        const __m128i found = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(x, quote), _mm_cmpeq_epi8(x, backslash)),
                                           _mm_cmpeq_epi8(_mm_min_epu8(x, control), x));
        const unsigned bits = (unsigned)_mm_movemask_epi8(found), highs = (unsigned)_mm_movemask_epi8(x);
        if (bits) {
            const int i = __builtin_ctz(bits);
            *high |= (highs & ((1u << i) - 1)) != 0;
            return p + i;
        }
        *high |= highs != 0;
    }
#endif
    for (; p < end; p++) {
        const unsigned char c = (unsigned char)*p;
        if (c == '"' || c == '\\' || c < 0x20) break;
        *high |= c >= 0x80;
    }
    return p;
}

/* ---- methods of str */

static bool is_among(Value chars, const char *p, int size) {
    for (size_t i = 0; i < chars.size;) {
        int own;
        decode(chars.s + i, &own);
        if (own == size && !memcmp(chars.s + i, p, (size_t)size)) return true;
        i += (size_t)own;
    }
    return false;
}

Value strip(Machine *m, Value s, const Value *chars, bool left, bool right) {
    no_markup(m, s);
    if (chars && chars->tag == NONE) chars = NULL;
    if (chars && chars->tag != STRING) give_up(m, "strip of other types");
    if (chars) charge(m, (size_t)s.size * chars->size);
    const char *p = s.s, *end = p + s.size;
    while (left && p < end) {
        int size;
        const uint32_t c = decode(p, &size);
        if (chars ? !is_among(*chars, p, size) : !is_space(c)) break;
        p += size;
    }
    while (right && p < end) {
        const char *q = end - 1;
        while (q > p && (*q & 0xC0) == 0x80) q--;
        int size;
        const uint32_t c = decode(q, &size);
        if (chars ? !is_among(*chars, q, size) : !is_space(c)) break;
        end = q;
    }
    charge(m, 8 * (s.size - (size_t)(end - p)));
    return of_string(p, (size_t)(end - p));
}

static Value popped(Machine *m, size_t base, ListKind kind) { /* pops the values pushed to `parsed` as a list */
    const Value list = of_list(m, (uint32_t)(m->parsed.n - base), kind);
    if (list.list->n) memcpy(list.list->v, m->parsed.at + base, list.list->n * sizeof(Value));
    m->parsed.n = base;
    return list;
}

static void push_text(Machine *m, const char *from, const char *to) {
    APPEND(m, m->parsed, of_string(from, (size_t)(to - from)));
}

static const char *skip_space(const char *p, const char *end, bool space) {
    for (int size; p < end && is_space(decode(p, &size)) == space; p += size) continue;
    return p;
}

static const char *before(const char *p) { /* the start of the character that ends at p */
    do p--;
    while ((*p & 0xC0) == 0x80);
    return p;
}

static const char *skip_space_back(const char *start, const char *p, bool space) {
    for (int size; p > start && is_space(decode(before(p), &size)) == space;) p = before(p);
    return p;
}

/* Splits at most `most` times, or everywhere if that is negative. */
Value split(Machine *m, Value s, const Value *separator, int64_t most) {
    const size_t base = m->parsed.n;
    const char *p = s.s, *end = p + s.size;
    charge(m, s.size);
    if (separator && separator->tag != NONE) {
        if (separator->tag != STRING || !separator->size) give_up(m, "split at other types");
        for (const char *q; most != 0 && (q = find(m, p, (size_t)(end - p), separator->s, separator->size)); most--) {
            push_text(m, p, q);
            p = q + separator->size;
        }
        push_text(m, p, end);
        return popped(m, base, PLAIN_LIST);
    }
    for (p = skip_space(p, end, true); p < end; most--) {
        const char *word = p;
        p = most ? skip_space(p, end, false) : end;
        push_text(m, word, p);
        p = skip_space(p, end, true);
    }
    return popped(m, base, PLAIN_LIST);
}

/* The caller charges for the text. */
static const char *find_last(const char *text, size_t n, Value wanted) {
    for (size_t i = n < wanted.size ? 0 : n - wanted.size + 1; i > 0; i--)
        if (text[i - 1] == wanted.s[0] && !memcmp(text + i - 1, wanted.s, wanted.size)) return text + i - 1;
    return NULL;
}

Value split_right(Machine *m, Value s, const Value *separator, int64_t most) {
    const bool spaces = !separator || separator->tag == NONE;
    if (most < 0 && spaces) return split(m, s, NULL, -1);
    const size_t base = m->parsed.n;
    const char *start = s.s, *p = start + s.size;
    charge(m, s.size);
    if (spaces) {
        for (p = skip_space_back(start, p, true); p > start; most--) {
            const char *end = p;
            p = most ? skip_space_back(start, p, false) : start;
            push_text(m, p, end);
            p = skip_space_back(start, p, true);
        }
    } else {
        if (separator->tag != STRING || !separator->size) give_up(m, "split at other types");
        for (const char *q; most != 0 && (q = find_last(start, (size_t)(p - start), *separator)); most--) {
            charge(m, (size_t)(p - q));
            push_text(m, q + separator->size, p);
            p = q;
        }
        push_text(m, start, p);
    }
    const Value list = popped(m, base, PLAIN_LIST);
    for (uint32_t i = 0, k = list.list->n; i + 1 < k; i++) { /* found from the right */
        const Value other = list.list->v[--k];
        list.list->v[k] = list.list->v[i];
        list.list->v[i] = other;
    }
    return list;
}

static const char *end_of_line(const char *p, const char *end) {
    for (int size; p < end && !is_line_break(decode(p, &size)); p += size) continue;
    return p;
}

static const char *after_break(const char *p, const char *end) {
    int size;
    if (*p == '\r' && p + 1 < end && p[1] == '\n') return p + 2;
    decode(p, &size);
    return p + size;
}

Value split_lines_of(Machine *m, Value s, bool keep_ends) {
    const size_t base = m->parsed.n;
    charge(m, s.size);
    for (const char *p = s.s, *end = p + s.size; p < end;) {
        const char *q = end_of_line(p, end), *next = q < end ? after_break(q, end) : q;
        push_text(m, p, keep_ends ? next : q);
        p = next;
    }
    return popped(m, base, PLAIN_LIST);
}

Value partition(Machine *m, Value s, Value separator, bool at_last) {
    if (separator.tag != STRING || !separator.size) give_up(m, "a partition at other types");
    charge(m, s.size);
    const char *q =
        at_last ? find_last(s.s, s.size, separator) : find(m, s.s, s.size, separator.s, separator.size);
    const Value parts = of_list(m, 3, TUPLE);
    for (int i = 0; i < 3; i++) parts.list->v[i] = LITERAL("");
    parts.list->v[at_last ? 2 : 0] = s;
    if (!q) return parts;
    const char *next = q + separator.size;
    parts.list->v[0] = of_string(s.s, (size_t)(q - s.s));
    parts.list->v[1] = of_string(q, separator.size);
    parts.list->v[2] = of_string(next, (size_t)(s.s + s.size - next));
    return parts;
}

/* Replacing nothing inserts the new text before each character and at the end. */
static void put_inserted(Machine *m, Value s, Value new, int64_t most, size_t mark) {
    const char *p = s.s, *end = p + s.size;
    for (; most != 0; most--) {
        put_traced(m, new.s, new.size);
        if (m->out.n - mark > MAX_TEXT) give_up(m, "a string is too large");
        if (p == end) break;
        int size;
        decode(p, &size);
        put_traced(m, p, (size_t)size);
        p += size;
    }
    put_traced(m, p, (size_t)(end - p));
}

/* Text without a label takes that of the text that it replaces: templates escape quotes like this. */
static void put_instead(Machine *m, Value new, Value old) {
    const size_t start = m->out.n, runs = m->runs.n;
    put_traced(m, new.s, new.size);
    const bool is_labelled = m->runs.n > runs || (runs && m->runs.at[runs - 1].end > start);
    const uint32_t label = is_labelled || !new.size ? 0 : label_of(m, old);
    if (label) add_run(m, start, m->out.n, label);
}

Value replace(Machine *m, Value s, Value old, Value new, int64_t most) {
    no_markup(m, s);
    charge(m, s.size);
    const size_t mark = begin_text(m);
    if (!old.size) {
        put_inserted(m, s, new, most, mark);
        return end_text(m, mark);
    }
    const char *p = s.s, *end = p + s.size;
    for (const char *q; most != 0 && (q = find(m, p, (size_t)(end - p), old.s, old.size)); most--) {
        put_traced(m, p, (size_t)(q - p));
        put_instead(m, new, of_string(q, old.size));
        if (m->out.n - mark > MAX_TEXT) give_up(m, "a string is too large");
        p = q + old.size;
    }
    if (p > s.s) put_traced(m, p, (size_t)(end - p));
    const Value replaced = end_text(m, mark);
    return p > s.s ? replaced : s;
}

static bool separates_words(uint32_t c) { /* for the filter `title` */
    return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || is_space(c);
}

static Case case_of_next(Machine *m, uint32_t c, Case how) { /* after the character c */
    if (how == TITLE) return is_cased(m, c) ? LOWER : CAPITALIZE;
    return how == TITLE_FILTER && separates_words(c) ? UPPER : LOWER;
}

Value change_case(Machine *m, Value s, Case how) {
    no_markup(m, s);
    const uint32_t label = label_of(m, s);
    const size_t mark = m->out.n;
    Case next = how == TITLE ? CAPITALIZE : how == TITLE_FILTER ? UPPER : how;
    for (size_t i = 0; i < s.size;) {
        int size;
        const uint32_t c = decode(s.s + i, &size);
        i += (size_t)size;
        if (c < 0x80) {
            const bool is_lower = c >= 'a' && c <= 'z', is_upper = c >= 'A' && c <= 'Z';
            put_char(m, (char)(next != LOWER ? c - 32 * is_lower : c + 32 * is_upper));
        } else if (c == 0x3A3 && next == LOWER) { /* the lower case of a capital sigma depends on its word */
            static const char *const names[] = {"lower", "upper", "capitalize", "title", "title"};
            m->out.n = mark;
            return by_python(m, how == TITLE_FILTER ? "filter" : "method", names[how], &s, 1);
        } else {
            const CaseChange *changed = case_change(m, c, next);
            put(m, changed->bytes, changed->size);
        }
        if (how >= CAPITALIZE) next = how == CAPITALIZE ? LOWER : case_of_next(m, c, how);
    }
    return with_label(m, take_output(m, mark), label);
}

/* jinja2's filter: every line but the first is indented, unless it is empty. */
Value indent(Machine *m, Value s, Value by, bool first, bool blank) {
    const uint32_t label = label_of(m, s);
    if (s.size && s.s[s.size - 1] == '\r') s.size--; /* jinja2 appends a newline, which makes one break of both */
    const size_t mark = m->out.n;
    const char *p = s.s, *end = p + s.size;
    for (bool is_first = true;; is_first = false) {
        const char *q = end_of_line(p, end);
        if (!is_first) put_char(m, '\n');
        if (is_first ? first : blank || q > p) put(m, by.s, by.size);
        put(m, p, (size_t)(q - p));
        if (m->out.n - mark > MAX_TEXT) give_up(m, "a string is too large");
        if (q >= end) break;
        p = after_break(q, end);
    }
    return with_label(m, take_output(m, mark), label);
}

/* The end of a conversion of one value, which begins after its %; NULL if it is another one. */
static const char *end_of_conversion(const char *p, const char *end) {
    while (p < end && memchr("#0- +", *p, 5)) p++;
    while (p < end && *p >= '0' && *p <= '9') p++;
    if (p < end && *p == '.')
        do p++;
        while (p < end && *p >= '0' && *p <= '9');
    return p < end && memchr("sdiouxXeEfFgGcra", *p, 16) ? p + 1 : NULL;
}

/* text % arguments. False where that is not simple: then Python does it. */
static bool put_percent(Machine *m, Value s, const Value *a, uint32_t n) {
    uint32_t used = 0;
    for (const char *p = s.s, *end = p + s.size; p < end;) {
        const char *q = memchr(p, '%', (size_t)(end - p));
        put_labelled(m, p, (size_t)((q ? q : end) - p));
        if (!q) break;
        const bool is_percent = q + 1 < end && q[1] == '%';
        p = is_percent ? q + 2 : end_of_conversion(q + 1, end);
        if (is_percent) {
            put_char(m, '%');
            continue;
        }
        if (!p || used == n) return false;
        Value v = a[used++];
        if (p == q + 2 && q[1] == 's') {
            put_unowned(m, v);
        } else if (p == q + 2 && q[1] == 'd' && is_number(v)) {
            v.tag = INT;
            put_repr(m, v, 0);
        } else {
            const Value both[] = {of_string(q, (size_t)(p - q)), of_list(m, 1, TUPLE)};
            both[1].list->v[0] = v;
            put_converted(m, "operator", "%", both, 2, v);
        }
    }
    return used == n;
}

Value percent(Machine *m, Value s, Value arguments) {
    const bool many = arguments.tag == LIST && arguments.list->kind == TUPLE;
    const size_t mark = m->out.n;
    if (!s.markup &&
        put_percent(m, s, many ? arguments.list->v : &arguments, many ? arguments.list->n : 1))
        return take_output(m, mark);
    rewind_output(m, mark);
    const Value both[] = {s, arguments};
    return by_python(m, "operator", "%", both, 2);
}

/* ---- positions */

Value index_text(Machine *m, Value s, int64_t i) {
    no_markup(m, s);
    charge(m, s.size);
    const int64_t n = (int64_t)count_points(s.s, s.size);
    if (i < 0) i += n;
    if (i < 0 || i >= n) return undefined();
    const size_t at = point_offset(s.s, s.size, (size_t)i);
    int size;
    decode(s.s + at, &size);
    return of_string(s.s + at, (size_t)size);
}

/* A bound of a slice, as computed by Python's slice.indices. */
static int64_t bound(Value given, int64_t n, int64_t step, int64_t otherwise) {
    if (given.tag == NONE) return otherwise;
    int64_t i = given.i;
    if (i < 0) {
        i += n;
        if (i < 0) return step > 0 ? 0 : -1;
    }
    return i < n ? i : step > 0 ? n : n - 1;
}

/* Every step-th character, `count` in all. Text taken apart like this has no origin. */
static Value slice_by(Machine *m, Value s, int64_t low, int64_t count, int64_t step) {
    const uint32_t label = label_of(m, s);
    const size_t mark = m->out.n;
    const char *p = s.s + (count ? point_offset(s.s, s.size, (size_t)low) : 0), *end = s.s + s.size;
    for (int64_t i = 0; i < count; i++) {
        int size;
        decode(p, &size);
        put(m, p, (size_t)size);
        if (i + 1 == count) break;
        if (step > 0)
            p += point_offset(p, (size_t)(end - p), (size_t)step);
        else
            for (int64_t k = 0; k > step; k--) p = before(p);
    }
    return with_label(m, take_output(m, mark), label);
}

Value slice(Machine *m, Value v, Value start, Value stop, Value by) {
    if ((start.tag != NONE && !is_number(start)) || (stop.tag != NONE && !is_number(stop)) ||
        (by.tag != NONE && !is_number(by)))
        give_up(m, "a slice by other types than integers");
    const int64_t step = by.tag == NONE ? 1 : by.i;
    if (step == 0 || step > 1 << 30 || step < -(1 << 30)) give_up(m, "the step of a slice");
    if (v.tag == STRING) {
        no_markup(m, v);
        charge(m, v.size);
    } else if (v.tag != LIST || v.list->kind > RANGE) {
        give_up(m, "a slice of another type");
    }
    const bool ascii = v.tag == STRING && is_ascii(v.s, v.size);
    const int64_t n = v.tag == LIST ? v.list->n : ascii ? v.size : (int64_t)count_points(v.s, v.size);
    const int64_t low = bound(start, n, step, step > 0 ? 0 : n - 1), high = bound(stop, n, step, step > 0 ? n : -1);
    const int64_t count = step > 0 ? (high > low ? (high - low - 1) / step + 1 : 0)
                                   : (low > high ? (low - high - 1) / -step + 1 : 0);
    if (v.tag == STRING && step != 1) return slice_by(m, v, low, count, step);
    if (v.tag == STRING) {
        if (!count) return LITERAL("");
        const size_t from = ascii ? (size_t)low : point_offset(v.s, v.size, (size_t)low);
        const size_t to = ascii ? (size_t)high : from + point_offset(v.s + from, v.size - from, (size_t)(high - low));
        return of_string(v.s + from, to - from);
    }
    charge(m, (size_t)count * sizeof(Value));
    const Value result = of_list(m, (uint32_t)count, (ListKind)v.list->kind);
    for (int64_t i = 0, k = low; i < count; i++, k += step) result.list->v[i] = v.list->v[k];
    return result;
}
