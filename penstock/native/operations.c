/* Operations of templates on values: attributes, items, methods, filters and tests, as in jinja2's sandbox. */

#include "constants.h"
#include "names.h"
#include "values.h"

/* ---- adding */

static void put_markup(Machine *m, Value v) { /* markupsafe escapes the side that is plain */
    for (uint32_t i = 0; i < v.size; i++) {
        switch (v.markup ? 0 : v.s[i]) {
        case '&': PUT(m, "&amp;"); break;
        case '<': PUT(m, "&lt;"); break;
        case '>': PUT(m, "&gt;"); break;
        case '\'': PUT(m, "&#39;"); break;
        case '"': PUT(m, "&#34;"); break;
        default: put_char(m, v.s[i]);
        }
    }
}

static Value add_text(Machine *m, Value a, Value b) {
    if (a.markup || b.markup) {
        const size_t mark = m->out.n;
        put_markup(m, a);
        put_markup(m, b);
        Value sum = take_output(m, mark);
        sum.markup = 1;
        return sum;
    }
    if (!a.size) return b;
    if (!b.size) return a;
    const size_t n = (size_t)a.size + b.size;
    if (n > MAX_TEXT) give_up(m, "a string is too large");
    charge(m, n);
    char *p = arena(m, n);
    memcpy(p, a.s, a.size);
    memcpy(p + a.size, b.s, b.size);
    copy_origin(m, a.s, a.size, p);
    copy_origin(m, b.s, b.size, p + a.size);
    return of_string(p, n);
}

Value add(Machine *m, Value a, Value b) {
    if (a.tag == STRING && b.tag == STRING) return add_text(m, a, b);
    if (is_number(a) && is_number(b)) {
        int64_t sum;
        if (__builtin_add_overflow(a.i, b.i, &sum)) give_up(m, "an integer beyond 64 bits");
        return of_int(sum);
    }
    if (a.tag == LIST && b.tag == LIST && a.list->kind == b.list->kind && a.list->kind <= TUPLE) {
        const size_t n = (size_t)a.list->n + b.list->n;
        if (n > 1u << 24) give_up(m, "a list is too long");
        charge(m, n * sizeof(Value));
        const Value sum = of_list(m, (uint32_t)n, (ListKind)a.list->kind);
        if (a.list->n) memcpy(sum.list->v, a.list->v, a.list->n * sizeof(Value));
        if (b.list->n) memcpy(sum.list->v + a.list->n, b.list->v, b.list->n * sizeof(Value));
        return sum;
    }
    give_up(m, "+ of other types");
}

/* ---- attributes and items */

Iteration *iteration_of(Machine *m, Value loop) {
    Iteration *it = &m->loops[loop.i];
    if (loop.i >= m->loop_count || it->serial != loop.size) give_up(m, "a loop that has ended");
    if (!it->index) give_up(m, "a loop that has not begun");
    return it;
}

static Value loop_attribute(Machine *m, Value loop, Value name) {
    const Iteration *it = iteration_of(m, loop);
    const int64_t i = (int64_t)it->index - 1;
    if (IS(name, "index0")) return of_int(i);
    if (IS(name, "index")) return of_int(i + 1);
    if (IS(name, "first")) return of_bool(i == 0);
    if (IS(name, "previtem")) return i == 0 ? undefined() : it->tests ? it->previous : it->v[i - 1];
    if (IS(name, "depth0")) return of_int(it->depth);
    if (IS(name, "depth")) return of_int((int64_t)it->depth + 1);
    if (IS(name, "cycle") || IS(name, "changed")) {
        loop.tag = LOOP_METHOD;
        loop.markup = IS(name, "cycle") ? LOOP_CYCLE : LOOP_CHANGED;
        return loop;
    }
    if (it->tests) give_up(m, "what is left of a loop with a filter");
    if (IS(name, "last")) return of_bool(it->i == it->n);
    if (IS(name, "length")) return of_int(it->n);
    if (IS(name, "revindex")) return of_int(it->n - i);
    if (IS(name, "revindex0")) return of_int(it->n - i - 1);
    if (IS(name, "nextitem")) return it->i >= it->n ? undefined() : it->v[it->i];
    return undefined();
}

static bool is_one_of(Value name, const char *const *names) {
    for (; *names; names++)
        if (is_text(name, *names, strlen(*names))) return true;
    return false;
}

static Value method_value(Machine *m, Value v, Value name) {
    static const char *const refused[] = {"clear",  "pop",    "popitem", "setdefault", "update", "append",     "extend",
                                          "insert", "remove", "reverse", "sort",       "format", "format_map", NULL};
    if (is_number(v) || v.tag == FLOAT) give_up(m, "an attribute of a number");
    if (is_one_of(name, refused)) give_up(m, "a method that the sandbox may refuse");
    return of_tag(METHOD);
}

static int type_bit(Value v) {
    switch (v.tag) {
    case STRING: return OF_STRING;
    case DICT: return OF_DICT;
    case BOOL:
    case INT: return OF_INT;
    case FLOAT: return OF_FLOAT;
    case LIST: return v.list->kind == PLAIN_LIST ? OF_LIST : OF_TUPLE;
    default: return 0;
    }
}

Value get_attribute(Machine *m, Value v, Value name, int methods) { /* v.name: the attribute comes first */
    const Value *found;
    switch (v.tag) {
    case DICT:
        if (methods & OF_DICT) return method_value(m, v, name);
        found = look_up(m, v.dict, name);
        return found ? *found : undefined();
    case NAMESPACE:
        if (m->guards) give_up(m, "a loop's filter that reads a namespace which the loop may change");
        found = look_up(m, v.dict, name);
        return found ? *found : undefined();
    case LOOP: return loop_attribute(m, v, name);
    case STRING:
    case LIST:
    case INT:
    case BOOL:
    case FLOAT:
        no_markup(m, v);
        if (methods & type_bit(v)) return method_value(m, v, name);
        if (v.tag == LIST && v.list->kind > TUPLE) give_up(m, "an attribute of a view");
        return undefined();
    case NONE:
    case METHOD: return undefined();
    default: give_up(m, "an attribute of an undefined value or object");
    }
}

Value get_key(Machine *m, Value v, Value name, int methods) { /* v['name']: the key comes first */
    if (v.tag == DICT) {
        const Value *found = look_up(m, v.dict, name);
        if (found) return *found;
        return methods & OF_DICT ? method_value(m, v, name) : undefined();
    }
    return get_attribute(m, v, name, methods);
}

/* In a loop over numbers, messages[number] assigns the iteration to that message. */
static Value indexed(Machine *m, int64_t i, Value found) {
    if (found.tag != DICT || found.dict->message < 0 || !m->loop_count) return found;
    Iteration *it = &m->loops[m->loop_count - 1];
    if (it->testing) { /* jinja2 tests an item within the iteration before it */
        if (!it->is_owned && it->current.tag == INT && it->current.i == i)
            give_up(m, "a loop's filter that reads the message before");
        return found;
    }
    if (it->message >= 0 || !it->i || it->v[it->i - 1].tag != INT || it->v[it->i - 1].i != i) return found;
    it->message = found.dict->message;
    m->open_messages++;
    return found;
}

Value get_index(Machine *m, Value v, int64_t i) {
    switch (v.tag) {
    case LIST: {
        const int64_t n = v.list->n, at = i < 0 ? i + n : i;
        if (v.list->kind > RANGE) give_up(m, "an index of a view");
        return at < 0 || at >= n ? undefined() : indexed(m, i, v.list->v[at]);
    }
    case STRING: return index_text(m, v, i);
    case DICT:
        charge(m, 4 * (size_t)v.dict->n);
        for (uint32_t k = 0; k < v.dict->n; k++)
            if (v.dict->e[k].key.tag == INT && v.dict->e[k].key.i == i) return indexed(m, i, v.dict->e[k].value);
        return undefined();
    case NONE:
    case INT:
    case BOOL:
    case FLOAT: return undefined();
    default: give_up(m, "an index of another type");
    }
}

Value get_item(Machine *m, Value v, Value key) {
    static const char *const methods[] = {"clear",   "copy",       "fromkeys", "get",    "items", "keys", "pop",
                                          "popitem", "setdefault", "update",   "values", NULL};
    if (is_number(key)) return get_index(m, v, key.i);
    if (key.tag != STRING || v.tag != DICT) give_up(m, "an item by another type");
    const Value *found = look_up(m, v.dict, keyed(key));
    if (found) return *found;
    if (key.size && key.s[0] == '_') give_up(m, "an underscore attribute");
    return is_one_of(key, methods) ? method_value(m, v, key) : undefined();
}

/* 'a.b' as jinja2's make_attrgetter resolves it; the compiler excludes digits and underscores. */
Value get_path(Machine *m, Value v, Value path) {
    static const char *const usual[] = {"type", "role", "content", "name", NULL}; /* not attributes of str */
    if (path.tag != STRING) give_up(m, "an attribute by another type than text");
    const char *p = path.s, *end = p + path.size;
    for (;;) {
        const char *dot = memchr(p, '.', (size_t)(end - p));
        const Value name = of_string(p, (size_t)((dot ? dot : end) - p));
        if (v.tag == DICT)
            v = get_item(m, v, name);
        else if ((v.tag == STRING || v.tag == NONE) && !v.markup && is_one_of(name, usual))
            v = undefined();
        else
            give_up(m, "an attribute of another type");
        if (!dot) return v;
        p = dot + 1;
    }
}

/* ---- iterating */

Value entries(Machine *m, const Dict *d, What what, ListKind kind) {
    const Value list = of_list(m, d->n, kind);
    for (uint32_t i = 0; i < d->n; i++) {
        if (what == ITEMS) {
            const Value pair = of_list(m, 2, TUPLE);
            pair.list->v[0] = d->e[i].key;
            pair.list->v[1] = d->e[i].value;
            list.list->v[i] = pair;
        } else {
            list.list->v[i] = what == KEYS ? d->e[i].key : d->e[i].value;
        }
    }
    return list;
}

Value iterate(Machine *m, Value v) {
    switch (v.tag) {
    case LIST:
        if (v.list->kind == SPENT) give_up(m, "a generator used twice");
        if (v.list->kind == GENERATOR) v.list->kind = SPENT;
        return v;
    case DICT: return entries(m, v.dict, KEYS, GENERATOR);
    case UNDEFINED: return of_list(m, 0, GENERATOR);
    case STRING: {
        no_markup(m, v);
        charge(m, v.size);
        const Value list = of_list(m, (uint32_t)count_points(v.s, v.size), GENERATOR);
        int size;
        for (size_t i = 0, at = 0; i < list.list->n; i++, at += (size_t)size) {
            decode(v.s + at, &size);
            list.list->v[i] = of_string(v.s + at, (size_t)size);
        }
        return list;
    }
    default: give_up(m, "a loop over another type");
    }
}

int64_t length(Machine *m, Value v) {
    switch (v.tag) {
    case STRING: charge(m, v.size); return (int64_t)count_points(v.s, v.size);
    case LIST:
        if (v.list->kind >= GENERATOR) give_up(m, "the length of a generator");
        return v.list->n;
    case DICT: return v.dict->n;
    case UNDEFINED: return 0;
    default: give_up(m, "the length of another type");
    }
}

/* ---- methods */

Value join(Machine *m, Value separator, Value items, bool only_text) {
    const Value list = iterate(m, items);
    const size_t mark = begin_text(m);
    charge(m, 8 * (size_t)list.list->n);
    for (uint32_t i = 0; i < list.list->n; i++) {
        const Value item = no_markup(m, list.list->v[i]);
        if (only_text && item.tag != STRING) give_up(m, "a join of other types");
        if (i) put_traced(m, separator.s, separator.size);
        put_value(m, item);
        if (m->out.n - mark > MAX_TEXT) give_up(m, "a string is too large");
    }
    return end_text(m, mark);
}

static Value format(Machine *m, Value s, const Value *a, int n) { /* only plain {} */
    const size_t mark = m->out.n;
    int used = 0;
    for (uint32_t i = 0; i < s.size; i++) {
        const char c = s.s[i], next = i + 1 < s.size ? s.s[i + 1] : 0;
        if (c == '{' && next == '}') {
            if (used == n) give_up(m, "format without enough arguments");
            const Value text = to_text(m, a[used++]);
            put(m, text.s, text.size);
            i++;
        } else if (c == '{' || c == '}') {
            if (next != c) give_up(m, "format with fields");
            put_char(m, c);
            i++;
        } else {
            put_char(m, c);
        }
    }
    return take_output(m, mark);
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

static Value count_text(Machine *m, Value s, Value wanted) {
    if (!wanted.size) give_up(m, "a count of nothing");
    charge(m, s.size);
    int64_t count = 0;
    const char *p = s.s, *end = p + s.size;
    for (const char *q; (q = find(m, p, (size_t)(end - p), wanted.s, wanted.size)); p = q + wanted.size) count++;
    return of_int(count);
}

static Value text_method(Machine *m, Value s, int method, Value *a, int n) {
    no_markup(m, s);
    for (int i = 0; i < n; i++) no_markup(m, a[i]);
    const bool texts = (n < 1 || a[0].tag == STRING) && (n < 2 || a[1].tag == STRING);
    switch (method) {
    case METHOD_split:
        if (n > 2 || (n == 2 && !is_number(a[1]))) break;
        return split(m, s, n ? a : NULL, n == 2 && a[1].i >= 0 ? a[1].i : -1);
    case METHOD_strip:
    case METHOD_lstrip:
    case METHOD_rstrip:
        if (n > 1) break;
        return strip(m, s, n ? a : NULL, method != METHOD_rstrip, method != METHOD_lstrip);
    case METHOD_startswith:
    case METHOD_endswith:
        if (n != 1) break;
        return starts_or_ends(m, s, a[0], method == METHOD_endswith);
    case METHOD_removeprefix:
        if (n != 1 || !texts) break;
        return has_affix(m, s, a[0], false) ? of_string(s.s + a[0].size, s.size - a[0].size) : s;
    case METHOD_removesuffix:
        if (n != 1 || !texts) break;
        return has_affix(m, s, a[0], true) ? of_string(s.s, s.size - a[0].size) : s;
    case METHOD_replace:
        if (n == 3 && texts && is_number(a[2])) return replace(m, s, a[0], a[1], a[2].i < 0 ? -1 : a[2].i);
        if (n != 2 || !texts) break;
        return replace(m, s, a[0], a[1], -1);
    case METHOD_upper:
    case METHOD_lower:
    case METHOD_capitalize:
        if (n) break;
        return change_case(m, s, method == METHOD_upper ? UPPER : method == METHOD_lower ? LOWER : CAPITALIZE);
    case METHOD_find: {
        if (n != 1 || !texts || !a[0].size) break;
        charge(m, s.size);
        const char *found = find(m, s.s, s.size, a[0].s, a[0].size);
        return of_int(found ? (int64_t)count_points(s.s, (size_t)(found - s.s)) : -1);
    }
    case METHOD_count:
        if (n != 1 || !texts) break;
        return count_text(m, s, a[0]);
    case METHOD_join:
        if (n != 1) break;
        return join(m, s, a[0], true);
    case METHOD_format: return format(m, s, a, n);
    default: break;
    }
    give_up(m, "a method of text with other arguments");
}

Value call_method(Machine *m, Value v, int method, Value *a, int n) {
    if (v.tag == STRING) return text_method(m, v, method, a, n);
    if (v.tag != DICT) give_up(m, "a method of another type");
    if (method == METHOD_get && (n == 1 || n == 2) && a[0].tag == STRING) {
        const Value *found = look_up(m, v.dict, keyed(a[0]));
        return found ? *found : n == 2 ? a[1] : none();
    }
    if (method == METHOD_items && !n) return entries(m, v.dict, ITEMS, VIEW);
    if (method == METHOD_keys && !n) return entries(m, v.dict, KEYS, VIEW);
    if (method == METHOD_values && !n) return entries(m, v.dict, VALUES, VIEW);
    give_up(m, "another method of an object");
}

/* ---- tests */

bool run_test(Machine *m, Value v, int test, Value *a, int n) {
    const bool is_list = v.tag == LIST;
    if ((n == 1) != (test >= TEST_eq)) give_up(m, "the arguments of a test"); /* those from `eq` on take one */
    switch (test) {
    case TEST_defined: return v.tag != UNDEFINED;
    case TEST_undefined: return v.tag == UNDEFINED;
    case TEST_none: return v.tag == NONE;
    case TEST_string: return v.tag == STRING;
    case TEST_mapping: return v.tag == DICT;
    case TEST_iterable:
    case TEST_sequence: /* Undefined has a length and can be iterated over */
        if (v.tag == LOOP) give_up(m, "a test of loop");
        if (v.tag == STRING || v.tag == DICT || v.tag == UNDEFINED) return true;
        return is_list && (test == TEST_iterable || v.list->kind <= RANGE);
    case TEST_boolean: return v.tag == BOOL;
    case TEST_true: return v.tag == BOOL && v.i;
    case TEST_false: return v.tag == BOOL && !v.i;
    case TEST_number: return is_number(v) || v.tag == FLOAT;
    case TEST_integer: return v.tag == INT;
    case TEST_float: return v.tag == FLOAT;
    case TEST_truthy: return truth(m, v);
    case TEST_odd:
    case TEST_even:
        if (!is_number(v)) give_up(m, "odd or even of another type");
        return (v.i & 1) == (test == TEST_odd);
    case TEST_eq: return equal(m, v, a[0], 0);
    case TEST_ne: return !equal(m, v, a[0], 0);
    case TEST_in: return contains(m, v, a[0]);
    case TEST_lt: return order(m, v, a[0]) < 0;
    case TEST_gt: return order(m, v, a[0]) > 0;
    default: give_up(m, "a test");
    }
}
