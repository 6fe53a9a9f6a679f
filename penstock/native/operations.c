/* Operations of templates on values: attributes, items, loops and tests, as in jinja2's sandbox. */

#include "constants.h"
#include "names.h"
#include "values.h"

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
    if (is_numeric(v)) give_up(m, "an attribute of a number");
    if (is_one_of(name, refused)) give_up(m, "a method that the sandbox may refuse");
    return of_tag(METHOD);
}

static int type_bit(Value v) {
    switch (v.tag) {
    case STRING: return OF_STRING;
    case DICT: return OF_DICT;
    case BOOL:
    case BIG:
    case INT: return OF_INT;
    case FLOAT: return OF_FLOAT;
    case LIST: return v.list->kind == PLAIN_LIST ? OF_LIST : OF_TUPLE;
    default: return 0;
    }
}

Value get_attribute(Machine *m, Value v, Value name, int methods) { /* v.name: the attribute comes first */
    static const char *const usual[] = {"type",  "name",       "role",  "content",    "description", "required", "properties",
                                        "title", "parameters", "items", "additionalProperties", "enum", "format", "anyOf",
                                        "oneOf", "default", NULL}; /* attributes of neither ranges, views nor generators */
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
    case BIG:
    case BOOL:
    case FLOAT:
        no_markup(m, v);
        if (v.tag == LIST && v.list->is_group && IS(name, "grouper")) return v.list->v[0];
        if (v.tag == LIST && v.list->is_group && IS(name, "list")) return v.list->v[1];
        if (methods & type_bit(v)) return method_value(m, v, name);
        if (v.tag == LIST && v.list->kind > TUPLE && !is_one_of(name, usual)) give_up(m, "an attribute of a view");
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
    case BIG:
    case BOOL:
    case FLOAT: return undefined();
    default: give_up(m, "an index of another type");
    }
}

static bool has_only_text_keys(Machine *m, Value v) { /* of a dict; other values have no keys but numbers */
    if (v.tag == DICT) charge(m, v.dict->n);
    for (uint32_t i = 0; v.tag == DICT && i < v.dict->n; i++)
        if (v.dict->e[i].key.tag != STRING) return false;
    return v.tag == DICT || v.tag == STRING || v.tag == NONE || is_numeric(v) || (v.tag == LIST && v.list->kind <= RANGE);
}

Value get_item(Machine *m, Value v, Value key) {
    static const char *const methods[] = {"clear",   "copy",       "fromkeys", "get",    "items", "keys", "pop",
                                          "popitem", "setdefault", "update",   "values", NULL};
    if (is_number(key)) return get_index(m, v, key.i);
    if (!is_numeric(key) && key.tag <= DICT && key.tag != STRING && has_only_text_keys(m, v)) return undefined();
    if (key.tag != STRING || v.tag != DICT) give_up(m, "an item by another type");
    const Value *found = look_up(m, v.dict, keyed(key));
    if (found) return *found;
    if (key.size && key.s[0] == '_') give_up(m, "an underscore attribute");
    return is_one_of(key, methods) ? method_value(m, v, key) : undefined();
}

static Value get_part(Machine *m, Value v, Value name) { /* one part of a path */
    static const char *const usual[] = {"type", "role", "content", "name", NULL}; /* not attributes of str */
    int64_t number = 0;
    uint32_t digits = 0;
    for (; digits < name.size && digits < 18 && name.s[digits] >= '0' && name.s[digits] <= '9'; digits++)
        number = number * 10 + (name.s[digits] - '0');
    if (name.size && digits == name.size) return get_index(m, v, number);
    if (v.tag == DICT) return get_item(m, v, name);
    if (v.tag == LIST && v.list->is_group && IS(name, "grouper")) return v.list->v[0];
    if (v.tag == LIST && v.list->is_group && IS(name, "list")) return v.list->v[1];
    if ((v.tag != STRING && v.tag != NONE) || v.markup || !is_one_of(name, usual))
        give_up(m, "an attribute of another type");
    return undefined();
}

/* 'a.b' as jinja2's make_attrgetter resolves it: an undefined part becomes `otherwise`, unless that is None. */
Value get_path(Machine *m, Value v, Value path, Value otherwise) {
    if (path.tag == NONE) return v;
    if (path.tag != STRING && path.tag != INT) give_up(m, "an attribute by another type than text");
    if (path.tag == STRING && (path.size > 256 || !is_ascii(path.s, path.size))) give_up(m, "an unusual attribute");
    for (const char *p = path.s, *end = p + path.size;;) {
        const char *dot = path.tag == INT ? NULL : memchr(p, '.', (size_t)(end - p));
        v = path.tag == INT ? get_index(m, v, path.i) : get_part(m, v, of_string(p, (size_t)((dot ? dot : end) - p)));
        if (v.tag == UNDEFINED && otherwise.tag != NONE) v = otherwise;
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

/* ---- tests */

static bool is_callable(Machine *m, Value v) {
    if (v.tag == NAMESPACE) give_up(m, "a test of namespace");
    return v.tag == METHOD || v.tag == MACRO || v.tag == FUNCTION || v.tag == LOOP || v.tag == UNDEFINED;
}

static Value no_text(Machine *m, Value v) { /* whose remainder is a text */
    if (v.tag == STRING) give_up(m, "a test of numbers on text");
    return v;
}

static bool is_same(Machine *m, Value a, Value b) {
    if (a.tag != b.tag) return false;
    if (a.tag == NONE) return true;
    if (a.tag != BOOL) give_up(m, "sameas of other types than booleans and none");
    return a.i == b.i;
}

static bool is_divisible(Machine *m, Value v, Value by) {
    return !truth(m, arithmetic(m, OP_MODULO, v, by));
}

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
    case TEST_number: return is_numeric(v);
    case TEST_integer: return v.tag == INT || v.tag == BIG;
    case TEST_float: return v.tag == FLOAT;
    case TEST_truthy: return truth(m, v);
    case TEST_odd: return equal(m, arithmetic(m, OP_MODULO, no_text(m, v), of_int(2)), of_int(1), 0);
    case TEST_even: return is_divisible(m, no_text(m, v), of_int(2));
    case TEST_callable: return is_callable(m, v);
    case TEST_escaped: return v.tag == STRING && v.markup;
    case TEST_lower: return truth(m, by_python(m, "test", "lower", &v, 1));
    case TEST_upper: return truth(m, by_python(m, "test", "upper", &v, 1));
    case TEST_eq: return equal(m, v, a[0], 0);
    case TEST_ne: return !equal(m, v, a[0], 0);
    case TEST_in: return contains(m, v, a[0]);
    case TEST_lt: return order(m, v, a[0]) < 0;
    case TEST_le: return order(m, v, a[0]) <= 0;
    case TEST_gt: return order(m, v, a[0]) > 0;
    case TEST_ge: return order(m, v, a[0]) >= 0;
    case TEST_divisibleby: return is_divisible(m, no_text(m, v), a[0]);
    case TEST_sameas: return is_same(m, v, a[0]);
    default: give_up(m, "a test");
    }
}
