/* Methods of str, list and dict. Those that are not written here are left to Python. */

#include "names.h"
#include "values.h"

#define NAME(x) #x,
static const char *const method_names[] = {METHODS(NAME)};

/* ---- text */

Value join(Machine *m, Value separator, Value items, bool only_text) {
    const Value list = iterate(m, items);
    const size_t mark = begin_text(m);
    charge(m, 8 * (size_t)list.list->n);
    for (uint32_t i = 0; i < list.list->n; i++) {
        const Value item = list.list->v[i];
        if (only_text && item.tag != STRING) give_up(m, "a join of other types");
        if (i) put_traced(m, separator.s, separator.size);
        put_value(m, item);
        if (m->out.n - mark > MAX_TEXT) give_up(m, "a string is too large");
    }
    return end_text(m, mark);
}

/* The value of a replacement field {}, {0} or {name}; NULL where it is none of these. */
static const Value *field(Value name, const List *values, const Dict *named, int64_t *next) {
    if (!name.size) return *next >= 0 && *next < values->n ? &values->v[(*next)++] : NULL;
    if (name.s[0] < '0' || name.s[0] > '9') return find_key(named, keyed(name));
    const uint32_t number = (uint32_t)(name.s[0] - '0');
    if (name.size > 1 || *next > 0 || number >= values->n) return NULL;
    *next = -1; /* numbered fields and {} don't mix */
    return &values->v[number];
}

static void put_specified(Machine *m, Value specification, Value v) { /* a conversion or format: "!r:>10" */
    const size_t mark = m->out.n;
    put_char(m, '{');
    put(m, specification.s, specification.size);
    put_char(m, '}');
    const Value all[] = {take_output(m, mark), of_list(m, 1, TUPLE), of_dict(m, 0)};
    all[1].list->v[0] = v;
    put_converted(m, "format", "format", all, 3, v);
}

static bool put_formatted(Machine *m, Value s, const List *values, const Dict *named) {
    int64_t next = 0;
    for (const char *p = s.s, *end = p + s.size; p < end;) {
        const char *q = p;
        while (q < end && *q != '{' && *q != '}') q++;
        put_labelled(m, p, (size_t)(q - p));
        if (q == end) break;
        p = q + 1;
        if (p < end && *p == *q) { /* {{ or }} */
            put_char(m, *p++);
            continue;
        }
        const char *close = *q == '{' ? memchr(p, '}', (size_t)(end - p)) : NULL, *name = p;
        while (close && p < close && *p != '!' && *p != ':' && *p != '{') p++;
        const Value *value = close ? field(of_string(name, (size_t)(p - name)), values, named, &next) : NULL;
        if (!value || memchr(p, '{', (size_t)(close - p))) return false;
        if (p == close)
            put_unowned(m, *value);
        else
            put_specified(m, of_string(p, (size_t)(close - p)), *value);
        p = close + 1;
    }
    return true;
}

/* a: a tuple of values and a dict of named ones. What is not simple is left to Python. */
static Value format(Machine *m, Value s, const Value *a, int n) {
    if (n != 2 || a[0].tag != LIST || a[1].tag != DICT) give_up(m, "the arguments of format");
    const size_t mark = m->out.n;
    if (!s.markup && put_formatted(m, s, a[0].list, a[1].dict)) return take_output(m, mark);
    rewind_output(m, mark);
    const Value all[] = {s, a[0], a[1]};
    return by_python(m, "format", "format", all, 3);
}

static bool has_affix(Machine *m, Value s, Value affix, bool at_end) {
    if (affix.tag != STRING) give_up(m, "startswith of other types");
    if (affix.size > s.size) return false;
    charge(m, affix.size);
    return !memcmp(at_end ? s.s + s.size - affix.size : s.s, affix.s, affix.size);
}

static Value starts_or_ends(Machine *m, Value s, Value affix, bool at_end) {
    if (affix.tag != LIST || affix.list->kind != TUPLE) return of_bool(has_affix(m, s, affix, at_end));
    bool found = false;
    for (uint32_t i = 0; i < affix.list->n; i++) found |= has_affix(m, s, affix.list->v[i], at_end);
    return of_bool(found);
}

static int64_t count_text(Machine *m, Value s, Value wanted) {
    charge(m, s.size);
    int64_t count = 0;
    const char *p = s.s, *end = p + s.size;
    for (const char *q; (q = find(m, p, (size_t)(end - p), wanted.s, wanted.size)); p = q + wanted.size) count++;
    return count;
}

static int64_t find_text(Machine *m, Value s, Value wanted) { /* the position, or -1 */
    charge(m, s.size);
    const char *found = find(m, s.s, s.size, wanted.s, wanted.size);
    return found ? (int64_t)count_points(s.s, (size_t)(found - s.s)) : -1;
}

/* Methods that give parts of the text or put such parts together: these keep their origin. */
static bool part_of_text(Machine *m, Value s, int method, Value *a, int n, Value *found) {
    const bool texts = (n < 1 || a[0].tag == STRING) && (n < 2 || a[1].tag == STRING);
    const int64_t most = n == 2 && is_number(a[1]) && a[1].i >= 0 ? a[1].i : -1;
    switch (method) {
    case METHOD_split:
    case METHOD_rsplit:
        if (n > 2 || (n == 2 && !is_number(a[1]))) break;
        *found = method == METHOD_split ? split(m, s, n ? a : NULL, most) : split_right(m, s, n ? a : NULL, most);
        return true;
    case METHOD_strip:
    case METHOD_lstrip:
    case METHOD_rstrip:
        if (n > 1) break;
        *found = strip(m, s, n ? a : NULL, method != METHOD_rstrip, method != METHOD_lstrip);
        return true;
    case METHOD_splitlines:
        if (n > 1 || (n && !is_number(a[0]))) break;
        *found = split_lines_of(m, s, n && a[0].i);
        return true;
    case METHOD_partition:
    case METHOD_rpartition:
        if (n != 1) break;
        *found = partition(m, s, a[0], method == METHOD_rpartition);
        return true;
    case METHOD_removeprefix:
    case METHOD_removesuffix: {
        if (n != 1 || !texts) break;
        const bool at_end = method == METHOD_removesuffix;
        const uint32_t size = has_affix(m, s, a[0], at_end) ? a[0].size : 0;
        *found = of_string(at_end ? s.s : s.s + size, s.size - size);
        return true;
    }
    case METHOD_replace:
        if (n < 2 || n > 3 || !texts || (n == 3 && !is_number(a[2]))) break;
        *found = replace(m, s, a[0], a[1], n == 3 && a[2].i >= 0 ? a[2].i : -1);
        return true;
    case METHOD_join:
        if (n != 1) break;
        *found = join(m, s, a[0], true);
        return true;
    default: return false;
    }
    give_up(m, "a method of text with other arguments");
}

static Value text_method(Machine *m, Value s, int method, Value *a, int n) {
    Value found;
    if (method == METHOD_format) return format(m, s, a, n);
    if (!s.markup) {
        for (int i = 0; i < n; i++) no_markup(m, a[i]);
        if (part_of_text(m, s, method, a, n, &found)) return found;
        const bool wanted = n == 1 && a[0].tag == STRING && a[0].size;
        switch (method) {
        case METHOD_startswith:
        case METHOD_endswith:
            if (n != 1) break;
            return starts_or_ends(m, s, a[0], method == METHOD_endswith);
        case METHOD_upper:
        case METHOD_lower:
        case METHOD_capitalize:
        case METHOD_title:
            if (n) break;
            return change_case(m, s, method == METHOD_upper   ? UPPER
                                     : method == METHOD_lower ? LOWER
                                     : method == METHOD_title ? TITLE
                                                              : CAPITALIZE);
        case METHOD_count:
            if (!wanted) break;
            return of_int(count_text(m, s, a[0]));
        case METHOD_find:
            if (!wanted) break;
            return of_int(find_text(m, s, a[0]));
        default: break;
        }
    }
    Value *all = arena(m, ((size_t)n + 1) * sizeof(Value));
    all[0] = s;
    if (n) memcpy(all + 1, a, (size_t)n * sizeof(Value));
    return by_python(m, "method", method_names[method], all, n + 1);
}

/* ---- lists and dicts */

static Value dict_get(Machine *m, const Dict *d, Value key, Value otherwise) {
    if (key.tag == STRING) {
        const Value *found = look_up(m, d, keyed(key));
        return found ? *found : otherwise;
    }
    if (key.tag == LIST || key.tag == DICT) give_up(m, "an unhashable key");
    charge(m, 4 * (size_t)d->n);
    for (uint32_t i = 0; i < d->n; i++)
        if (d->e[i].key.tag != STRING && equal(m, d->e[i].key, key, 0)) return d->e[i].value;
    return otherwise;
}

static Value copy_of(Machine *m, const Dict *d) {
    const Value copy = of_dict(m, d->n);
    charge(m, d->n * sizeof(Entry));
    if (d->n) memcpy(copy.dict->e, d->e, d->n * sizeof(Entry));
    copy.dict->n = d->n;
    return copy;
}

static Value dict_method(Machine *m, const Dict *d, int method, const Value *a, int n) {
    if (method == METHOD_get && (n == 1 || n == 2)) return dict_get(m, d, a[0], n == 2 ? a[1] : none());
    if (method == METHOD_items && !n) return entries(m, d, ITEMS, VIEW);
    if (method == METHOD_keys && !n) return entries(m, d, KEYS, VIEW);
    if (method == METHOD_values && !n) return entries(m, d, VALUES, VIEW);
    if (method == METHOD_copy && !n) return copy_of(m, d);
    give_up(m, "another method of an object");
}

static Value list_method(Machine *m, Value v, int method, const Value *a, int n) {
    const List *list = v.list;
    if (list->kind > TUPLE) give_up(m, "a method of a range, view or generator");
    charge(m, 8 * (size_t)list->n);
    if (method == METHOD_copy && !n && list->kind == PLAIN_LIST) return slice(m, v, none(), none(), none());
    if ((method != METHOD_count && method != METHOD_index) || n != 1) give_up(m, "another method of a list");
    int64_t count = 0;
    for (uint32_t i = 0; i < list->n; i++) {
        if (!equal(m, list->v[i], a[0], 0)) continue;
        if (method == METHOD_index) return of_int(i);
        count++;
    }
    if (method == METHOD_index) give_up(m, "the index of an item that is not in the list");
    return of_int(count);
}

Value call_method(Machine *m, Value v, int method, Value *a, int n) {
    if (v.tag == STRING) return text_method(m, v, method, a, n);
    if (v.tag == DICT) return dict_method(m, v.dict, method, a, n);
    if (v.tag == LIST) return list_method(m, v, method, a, n);
    if (v.tag == LOOP && method == METHOD_cycle && n) { /* gives up if the loop has ended */
        const Value i = get_attribute(m, v, LITERAL("index0"), 0);
        return a[i.i % n];
    }
    if (is_numeric(v) && !n) return by_python(m, "method", method_names[method], &v, 1);
    give_up(m, "a method of another type");
}
