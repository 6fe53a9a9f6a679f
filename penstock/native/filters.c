/* The filters of jinja2 and transformers that templates use; a[0] is the filtered value. */

#include "names.h"
#include "values.h"

static Value spaces(Machine *m, int64_t n) {
    char *text = arena(m, (size_t)n + 1);
    memset(text, ' ', (size_t)n);
    return of_string(text, (size_t)n);
}

static Value indentation(Machine *m, Value by) { /* a number of spaces, or a text */
    if (by.tag == STRING) return no_markup(m, by);
    if (!is_number(by) || by.i > 1000) give_up(m, "an indentation of another type, or of more than 1000");
    return spaces(m, by.i > 0 ? by.i : 0);
}

/* tojson(ensure_ascii, indent, separators, sort_keys): either all four arguments are present, or none. */
void print_json(Machine *m, Value v, Value *a, int n) {
    JsonStyle style = {.between = LITERAL(", "), .after_key = LITERAL(": ")};
    if (n == 4) {
        style.ascii = truth(m, a[0]);
        style.sorted = truth(m, a[3]);
        style.indented = a[1].tag != NONE;
        if (style.indented) {
            style.indent = indentation(m, a[1]);
            style.between = LITERAL(",");
        }
        if (a[2].tag == LIST && a[2].list->n == 2 && a[2].list->v[0].tag == STRING && a[2].list->v[1].tag == STRING) {
            style.between = a[2].list->v[0];
            style.after_key = a[2].list->v[1];
        } else if (a[2].tag != NONE) {
            give_up(m, "other separators of tojson");
        }
    }
    put_json(m, v, &style, 0);
}

static Value to_json(Machine *m, Value v, Value *a, int n) {
    const size_t mark = m->out.n;
    print_json(m, v, a, n);
    return take_output(m, mark);
}

/* Stable insertion of v by its key, in ascending order. */
static void insert(Machine *m, Value *sorted, Value *keys, uint32_t n, Value v, Value key) {
    uint32_t k = n;
    for (; k && order(m, keys[k - 1], key) > 0; k--) {
        sorted[k] = sorted[k - 1];
        keys[k] = keys[k - 1];
    }
    sorted[k] = v;
    keys[k] = key;
}

static Value without_case(Machine *m, Value v) { return v.tag == STRING ? change_case(m, v, LOWER) : v; }

static Value sorted(Machine *m, Value v, const Value *path, bool by_key) {
    const Value list = iterate(m, v), result = of_list(m, list.list->n, PLAIN_LIST);
    const uint32_t n = list.list->n;
    if (n > MAX_SORT) give_up(m, "a sort of many elements");
    Value *keys = arena(m, (n + 1) * sizeof(Value));
    for (uint32_t i = 0; i < n; i++) {
        const Value item = list.list->v[i];
        const Value key = by_key ? item.list->v[0] : path ? get_path(m, item, *path) : item;
        insert(m, result.list->v, keys, i, item, without_case(m, key));
    }
    return result;
}

static Value unique(Machine *m, Value v) {
    const Value list = iterate(m, v), result = of_list(m, list.list->n, GENERATOR);
    if (list.list->n > MAX_SORT) give_up(m, "unique of many elements");
    Value *seen = arena(m, (list.list->n + 1) * sizeof(Value));
    uint32_t n = 0;
    for (uint32_t i = 0; i < list.list->n; i++) {
        if (list.list->v[i].tag != STRING) give_up(m, "unique of other types");
        const Value key = without_case(m, list.list->v[i]);
        uint32_t k = 0;
        while (k < n && !equal(m, seen[k], key, 0)) k++;
        if (k < n) continue;
        seen[n] = key;
        result.list->v[n++] = list.list->v[i];
    }
    result.list->n = n;
    return result;
}

static Value extreme(Machine *m, Value v, bool largest) {
    const Value list = iterate(m, v);
    if (!list.list->n) return undefined();
    charge(m, 8 * (size_t)list.list->n);
    Value found = list.list->v[0];
    for (uint32_t i = 0; i < list.list->n; i++) {
        const Value item = list.list->v[i];
        if (!is_number(item)) give_up(m, "min or max of other types");
        if (largest ? item.i > found.i : item.i < found.i) found = item;
    }
    return found;
}

static Value to_int(Machine *m, Value v) {
    if (is_number(v)) return of_int(v.i);
    if (v.tag != STRING || !v.size || v.size > 17) give_up(m, "int of another type");
    int64_t value = 0;
    for (uint32_t i = 0; i < v.size; i++) {
        if (v.s[i] < '0' || v.s[i] > '9') give_up(m, "int of other text than digits");
        value = value * 10 + (v.s[i] - '0');
    }
    return of_int(value);
}

static Value mapped(Machine *m, Value v, const Value *path, int filter) {
    if (!truth(m, v)) return of_list(m, 0, GENERATOR); /* jinja2 skips empty values and None */
    const Value list = iterate(m, v), result = of_list(m, list.list->n, GENERATOR);
    for (uint32_t i = 0; i < list.list->n; i++) {
        Value item = list.list->v[i];
        result.list->v[i] = path ? get_path(m, item, *path) : run_filter(m, filter, &item, 1, 0);
    }
    return result;
}

/* select, reject and their attribute forms: a[1] is the path of an attribute, the rest are arguments of the test. */
static Value selected(Machine *m, Value *a, int n, int test, bool by_attribute, bool wanted) {
    if (n < 1 + by_attribute) give_up(m, "the arguments of select");
    if (!truth(m, a[0])) return of_list(m, 0, GENERATOR);
    const Value list = iterate(m, a[0]), result = of_list(m, list.list->n, GENERATOR);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < list.list->n; i++) {
        const Value item = list.list->v[i], tested = by_attribute ? get_path(m, item, a[1]) : item;
        if (run_test(m, tested, test, a + 1 + by_attribute, n - 1 - by_attribute) == wanted)
            result.list->v[kept++] = item;
    }
    result.list->n = kept;
    return result;
}

static Value as_list(Machine *m, Value v, ListKind kind, bool backwards) {
    const Value list = iterate(m, v), result = of_list(m, list.list->n, kind);
    const uint32_t n = list.list->n;
    charge(m, n * sizeof(Value));
    for (uint32_t i = 0; i < n; i++) result.list->v[i] = list.list->v[backwards ? n - 1 - i : i];
    return result;
}

static Value last(Machine *m, Value v) {
    if (v.tag == LIST && v.list->kind >= GENERATOR) give_up(m, "last of a generator");
    const Value list = iterate(m, v);
    return list.list->n ? list.list->v[list.list->n - 1] : undefined();
}

static Value safe(Machine *m, Value v) { /* a copy: Markup has no origin */
    const Value text = to_text(m, v);
    char *copy = arena(m, text.size + 1);
    memcpy(copy, text.s, text.size);
    Value found = of_string(copy, text.size);
    found.markup = 1;
    return found;
}

Value run_filter(Machine *m, int filter, Value *a, int n, int extra) {
    const Value v = a[0];
    switch (filter) {
    case FILTER_trim: return strip(m, to_text(m, v), n > 1 ? &a[1] : NULL, true, true);
    case FILTER_length:
    case FILTER_count: return of_int(length(m, v));
    case FILTER_string: return to_text(m, v);
    case FILTER_default:
    case FILTER_d:
        if (v.tag != UNDEFINED && !(n > 2 && truth(m, a[2]) && !truth(m, v))) return v;
        return n > 1 ? a[1] : LITERAL("");
    case FILTER_items:
        if (v.tag == UNDEFINED) return of_list(m, 0, GENERATOR);
        if (v.tag != DICT) give_up(m, "items of another type");
        return entries(m, v.dict, ITEMS, GENERATOR);
    case FILTER_safe: return safe(m, v);
    case FILTER_join: return join(m, n > 1 ? to_text(m, no_markup(m, a[1])) : LITERAL(""), v, false);
    case FILTER_list: return as_list(m, v, PLAIN_LIST, false);
    case FILTER_dictsort:
        if (v.tag != DICT) give_up(m, "dictsort of another type");
        return sorted(m, entries(m, v.dict, ITEMS, PLAIN_LIST), NULL, true);
    case FILTER_upper: return change_case(m, to_text(m, v), UPPER);
    case FILTER_lower: return change_case(m, to_text(m, v), LOWER);
    case FILTER_capitalize: return change_case(m, to_text(m, v), CAPITALIZE);
    case FILTER_replace:
        if (n != 3 || a[1].tag != STRING || a[2].tag != STRING) give_up(m, "replace of other types");
        return replace(m, to_text(m, v), no_markup(m, a[1]), no_markup(m, a[2]), -1);
    case FILTER_first: {
        const Value list = iterate(m, v);
        return list.list->n ? list.list->v[0] : undefined();
    }
    case FILTER_last: return last(m, v);
    case FILTER_int: return to_int(m, v);
    case FILTER_tojson: return to_json(m, v, a + 1, n - 1);
    case FILTER_map_attribute:
        if (n != 2) give_up(m, "the arguments of map");
        return mapped(m, v, &a[1], 0);
    case FILTER_map_filter: return mapped(m, v, NULL, extra);
    case FILTER_select: return selected(m, a, n, extra, false, true);
    case FILTER_reject: return selected(m, a, n, extra, false, false);
    case FILTER_selectattr: return selected(m, a, n, extra, true, true);
    case FILTER_rejectattr: return selected(m, a, n, extra, true, false);
    case FILTER_min: return extreme(m, v, false);
    case FILTER_max: return extreme(m, v, true);
    case FILTER_unique: return unique(m, v);
    case FILTER_indent:
        if (v.tag != STRING) give_up(m, "indent of another type");
        return indent(m, no_markup(m, v), n > 1 ? indentation(m, a[1]) : spaces(m, 4), n > 2 && truth(m, a[2]));
    case FILTER_sort: return sorted(m, v, n > 1 ? &a[1] : NULL, false);
    case FILTER_reverse:
        if (v.tag != LIST || v.list->kind > TUPLE) give_up(m, "reverse of another type");
        return as_list(m, v, GENERATOR, true);
    default: give_up(m, "a filter");
    }
}
