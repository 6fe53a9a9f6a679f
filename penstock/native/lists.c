/* The filters that sort, choose, group or add up the items of a list. `a` has all arguments of a filter, with jinja2's
 * defaults where a template gives none. */

#include "names.h"
#include "values.h"

/* ---- sorting */

/* The places of keys in their order. Stable, also in descending order; takes n log n comparisons. */
uint32_t *sorted_places(Machine *m, const Value *keys, uint32_t n, bool descending, bool as_items) {
    uint32_t *from = arena(m, ((size_t)n + 1) * sizeof *from), *to = arena(m, ((size_t)n + 1) * sizeof *to);
    for (uint32_t i = 0; i < n; i++) from[i] = i;
    for (size_t width = 1; width < n; width *= 2) {
        charge(m, 16 * (size_t)n);
        for (size_t start = 0; start < n; start += 2 * width) {
            const size_t middle = start + width < n ? start + width : n, end = middle + width < n ? middle + width : n;
            for (size_t i = start, k = middle, at = start; at < end; at++) {
                bool right = i == middle;
                if (!right && k < end) {
                    const Value a = keys[from[i]], b = keys[from[k]];
                    const int found = as_items ? order_items(m, a, b) : order(m, a, b);
                    right = descending ? found < 0 : found > 0;
                }
                to[at] = from[right ? k++ : i++];
            }
        }
        uint32_t *swapped = from;
        from = to;
        to = swapped;
    }
    return from;
}

static Value without_case(Machine *m, Value v, bool case_sensitive) {
    return v.tag == STRING && !case_sensitive ? change_case(m, v, LOWER) : v;
}

/* The values to compare items by: an attribute, or several ("a,b") as a list where `many` allows it. */
static Value *keys_of(Machine *m, Value list, Value path, Value otherwise, bool case_sensitive, bool many) {
    const uint32_t n = list.list->n;
    Value *keys = arena(m, ((size_t)n + 1) * sizeof(Value));
    const Value comma = LITERAL(",");
    const bool splits = many && path.tag == STRING && memchr(path.s, ',', path.size);
    const Value paths = splits ? split(m, path, &comma, -1) : of_list(m, 0, PLAIN_LIST);
    for (uint32_t i = 0; i < n; i++) {
        if (!splits) {
            keys[i] = without_case(m, get_path(m, list.list->v[i], path, otherwise), case_sensitive);
            continue;
        }
        keys[i] = of_list(m, paths.list->n, PLAIN_LIST);
        for (uint32_t k = 0; k < paths.list->n; k++) {
            const Value own = get_path(m, list.list->v[i], paths.list->v[k], none());
            keys[i].list->v[k] = without_case(m, own, case_sensitive);
        }
    }
    return keys;
}

static Value placed(Machine *m, const Value *items, const uint32_t *places, uint32_t n) {
    const Value made = of_list(m, n, PLAIN_LIST);
    for (uint32_t i = 0; i < n; i++) made.list->v[i] = items[places[i]];
    return made;
}

static Value sorted(Machine *m, Value list, bool descending, bool case_sensitive, Value path) {
    const uint32_t n = list.list->n;
    const Value *keys = keys_of(m, list, path, none(), case_sensitive, true);
    return placed(m, list.list->v, sorted_places(m, keys, n, descending, true), n);
}

static Value sorted_dict(Machine *m, Value v, bool case_sensitive, Value by, bool descending) {
    if (v.tag != DICT) give_up(m, "dictsort of another type");
    if (!IS(by, "key") && !IS(by, "value")) give_up(m, "dictsort by something else");
    const Value pairs = entries(m, v.dict, ITEMS, PLAIN_LIST);
    const Value *keys = keys_of(m, pairs, of_int(IS(by, "value")), none(), case_sensitive, false);
    const uint32_t n = pairs.list->n;
    return placed(m, pairs.list->v, sorted_places(m, keys, n, descending, false), n);
}

static Value grouped(Machine *m, Value list, Value path, Value otherwise, bool case_sensitive) {
    const uint32_t n = list.list->n;
    const Value *keys = keys_of(m, list, path, otherwise, case_sensitive, false);
    const uint32_t *places = sorted_places(m, keys, n, false, false);
    const Value groups = of_list(m, n, PLAIN_LIST);
    uint32_t count = 0;
    for (uint32_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && equal(m, keys[places[i]], keys[places[end]], 0);) end++;
        const Value group = of_list(m, 2, TUPLE);
        group.list->is_group = true;
        group.list->v[0] = get_path(m, list.list->v[places[i]], path, otherwise); /* not in lower case */
        group.list->v[1] = placed(m, list.list->v, places + i, end - i);
        groups.list->v[count++] = group;
    }
    groups.list->n = count;
    return groups;
}

/* ---- choosing */

static Value unique(Machine *m, Value list, bool case_sensitive, Value path) {
    const uint32_t n = list.list->n;
    const Value *keys = keys_of(m, list, path, none(), case_sensitive, false);
    const Value result = of_list(m, n, GENERATOR), texts = of_dict(m, 0);
    Value *others = arena(m, ((size_t)n + 1) * sizeof(Value));
    uint32_t kept = 0, count = 0;
    for (uint32_t i = 0; i < n; i++) {
        const Value key = keys[i];
        bool known = false;
        if (key.tag == STRING) {
            known = look_up(m, texts.dict, keyed(key)) != NULL;
            if (!known) set_key(m, texts.dict, keyed(key), none());
        } else {
            if (!is_numeric(key) && key.tag != NONE) give_up(m, "unique of other types than text and numbers");
            charge(m, 8 * (size_t)count);
            for (uint32_t k = 0; k < count && !known; k++) known = equal(m, others[k], key, 0);
            if (!known) others[count++] = key;
        }
        if (!known) result.list->v[kept++] = list.list->v[i];
    }
    result.list->n = kept;
    return result;
}

static Value extreme(Machine *m, Value list, bool largest, bool case_sensitive, Value path) {
    if (!list.list->n) return undefined();
    charge(m, 8 * (size_t)list.list->n);
    const Value *keys = keys_of(m, list, path, none(), case_sensitive, false);
    uint32_t found = 0;
    for (uint32_t i = 1; i < list.list->n; i++) {
        const int ordered = order(m, keys[i], keys[found]);
        if (largest ? ordered > 0 : ordered < 0) found = i;
    }
    return list.list->v[found];
}

static Value mapped(Machine *m, Value v, Value path, Value otherwise) {
    if (!truth(m, v)) return of_list(m, 0, GENERATOR); /* jinja2 skips empty values and None */
    const Value list = iterate(m, v), result = of_list(m, list.list->n, GENERATOR);
    for (uint32_t i = 0; i < list.list->n; i++) result.list->v[i] = get_path(m, list.list->v[i], path, otherwise);
    return result;
}

static Value filtered(Machine *m, const Value *a, int n, int filter) { /* map by a filter and its arguments */
    if (!truth(m, a[0])) return of_list(m, 0, GENERATOR);
    const Value list = iterate(m, a[0]), result = of_list(m, list.list->n, GENERATOR);
    Value *own = arena(m, (size_t)n * sizeof(Value));
    if ((filter >= FILTER_map_attribute && filter <= FILTER_rejectattr) || filter == FILTER_attr)
        give_up(m, "map by a filter that takes filters");
    memcpy(own, a, (size_t)n * sizeof(Value));
    for (uint32_t i = 0; i < list.list->n; i++) {
        own[0] = list.list->v[i];
        result.list->v[i] = run_filter(m, filter, own, n, 0);
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
        const Value item = list.list->v[i], tested = by_attribute ? get_path(m, item, a[1], none()) : item;
        if (run_test(m, tested, test, a + 1 + by_attribute, n - 1 - by_attribute) == wanted)
            result.list->v[kept++] = item;
    }
    result.list->n = kept;
    return result;
}

/* ---- adding up and cutting */

static Value sum_of(Machine *m, Value list, Value path, Value start) {
    bool has_float = start.tag == FLOAT;
    Value *items = arena(m, ((size_t)list.list->n + 1) * sizeof(Value));
    for (uint32_t i = 0; i < list.list->n; i++) {
        items[i] = get_path(m, list.list->v[i], path, none());
        has_float |= items[i].tag == FLOAT;
    }
    if (has_float) { /* Python adds floats with a compensation */
        const Value all[] = {of_list(m, list.list->n, PLAIN_LIST), none(), start};
        if (list.list->n) memcpy(all[0].list->v, items, list.list->n * sizeof(Value));
        return by_python(m, "filter", "sum", all, 3);
    }
    if (start.tag == STRING) give_up(m, "a sum of text");
    for (uint32_t i = 0; i < list.list->n; i++) start = add(m, start, items[i]);
    return start;
}

static Value part_of(Machine *m, Value list, int64_t from, int64_t to, int64_t size, Value filling) {
    if (filling.tag == NONE) size = to - from;
    charge(m, (size_t)size * sizeof(Value));
    const Value part = of_list(m, (uint32_t)size, PLAIN_LIST);
    for (int64_t i = 0; i < size; i++) part.list->v[i] = from + i < to ? list.list->v[from + i] : filling;
    return part;
}

static int64_t size_of(Machine *m, Value v) {
    if (!is_number(v) || v.i < 1 || v.i > MAX_RANGE) give_up(m, "batch or slice by another number");
    return v.i;
}

static Value batched(Machine *m, Value list, int64_t size, Value filling) {
    const int64_t n = list.list->n, count = (n + size - 1) / size;
    const Value made = of_list(m, (uint32_t)count, GENERATOR);
    for (int64_t i = 0; i < count; i++) {
        const int64_t to = (i + 1) * size < n ? (i + 1) * size : n;
        made.list->v[i] = part_of(m, list, i * size, to, size, filling);
    }
    return made;
}

static Value sliced(Machine *m, Value list, int64_t count, Value filling) { /* columns; the first ones may be longer */
    const int64_t n = list.list->n, each = n / count, longer = n % count;
    const Value made = of_list(m, (uint32_t)count, GENERATOR);
    for (int64_t i = 0, from = 0, to; i < count; i++, from = to) {
        to = from + each + (i < longer);
        made.list->v[i] = part_of(m, list, from, to, each + 1, filling); /* jinja2 fills even where none is longer */
    }
    return made;
}

/* ---- all of them */

static bool is_reverse(Machine *m, Value v) { /* Python wants an integer here */
    if (!is_number(v)) give_up(m, "a sort whose direction is no boolean");
    return v.i != 0;
}

Value filter_list(Machine *m, int filter, Value *a, int n, int extra) {
    static const int counts[FILTER_COUNT] = {
        [FILTER_sort] = 4, [FILTER_dictsort] = 4, [FILTER_groupby] = 4, [FILTER_unique] = 3,        [FILTER_min] = 3,
        [FILTER_max] = 3,  [FILTER_sum] = 3,      [FILTER_batch] = 3,   [FILTER_map_attribute] = 3, [FILTER_slice] = 3};
    if (counts[filter] && n != counts[filter]) give_up(m, "the number of a filter's arguments");
    switch (filter) {
    case FILTER_sort: return sorted(m, iterate(m, a[0]), is_reverse(m, a[1]), truth(m, a[2]), a[3]);
    case FILTER_dictsort: return sorted_dict(m, a[0], truth(m, a[1]), a[2], is_reverse(m, a[3]));
    case FILTER_groupby: return grouped(m, iterate(m, a[0]), a[1], a[2], truth(m, a[3]));
    case FILTER_unique: return unique(m, iterate(m, a[0]), truth(m, a[1]), a[2]);
    case FILTER_min:
    case FILTER_max: return extreme(m, iterate(m, a[0]), filter == FILTER_max, truth(m, a[1]), a[2]);
    case FILTER_sum: return sum_of(m, iterate(m, a[0]), a[1], a[2]);
    case FILTER_batch: return batched(m, iterate(m, a[0]), size_of(m, a[1]), a[2]);
    case FILTER_slice: return sliced(m, iterate(m, a[0]), size_of(m, a[1]), a[2]);
    case FILTER_map_attribute: return mapped(m, a[0], a[1], a[2]);
    case FILTER_map_filter: return filtered(m, a, n, extra);
    case FILTER_select: return selected(m, a, n, extra, false, true);
    case FILTER_reject: return selected(m, a, n, extra, false, false);
    case FILTER_selectattr: return selected(m, a, n, extra, true, true);
    case FILTER_rejectattr: return selected(m, a, n, extra, true, false);
    default: give_up(m, "a filter");
    }
}
