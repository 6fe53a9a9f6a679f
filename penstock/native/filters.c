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

static bool is_int_text(Value v, int64_t *number) { /* only digits, not too many */
    *number = 0;
    if (v.tag != STRING || !v.size || v.size > 17) return false;
    for (uint32_t i = 0; i < v.size; i++) {
        if (v.s[i] < '0' || v.s[i] > '9') return false;
        *number = *number * 10 + (v.s[i] - '0');
    }
    return true;
}

static Value unlabelled(Machine *m, Value big) { /* another copy of its digits */
    char *copy = arena(m, big.size);
    memcpy(copy, big.s, big.size);
    big.s = copy;
    return big;
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

static Value reversed(Machine *m, Value v) {
    if (v.tag == STRING) return slice(m, v, none(), none(), of_int(-1));
    return as_list(m, v, v.tag == LIST && v.list->kind == GENERATOR ? PLAIN_LIST : GENERATOR, true);
}

static Value safe(Machine *m, Value v) { /* a copy: Markup has no origin, but labels */
    const Value text = to_text(m, v);
    char *copy = arena(m, text.size + 1);
    memcpy(copy, text.s, text.size);
    copy_labels(m, text.s, text.size, copy);
    Value found = of_string(copy, text.size);
    found.markup = 1;
    return found;
}

static Value attribute(Machine *m, Value v, int methods) { /* |attr: unlike v.name, never an item */
    if (v.tag != STRING && v.tag != DICT && !is_numeric(v) && v.tag != NONE &&
        !(v.tag == LIST && v.list->kind <= TUPLE && !v.list->is_group))
        give_up(m, "attr of an undefined value, range or object");
    if (methods && !(v.tag == NONE)) give_up(m, "attr of a method");
    return undefined();
}

/* Filters of text whose result has no origin where the text is Markup. */
static bool is_of_text(int filter) {
    return filter == FILTER_trim || filter == FILTER_replace || filter == FILTER_indent || filter == FILTER_upper ||
           filter == FILTER_lower || filter == FILTER_capitalize || filter == FILTER_title || filter == FILTER_reverse;
}

static Value filter_text(Machine *m, int filter, Value v, const Value *a, int n) { /* a: the arguments */
    int64_t most;
    switch (filter) {
    case FILTER_trim: return strip(m, to_text(m, v), n ? a : NULL, true, true);
    case FILTER_upper: return change_case(m, to_text(m, v), UPPER);
    case FILTER_lower: return change_case(m, to_text(m, v), LOWER);
    case FILTER_capitalize: return change_case(m, to_text(m, v), CAPITALIZE);
    case FILTER_title: return change_case(m, to_text(m, v), TITLE_FILTER);
    case FILTER_reverse: return reversed(m, v);
    case FILTER_replace: {
        if (n != 3 || (a[2].tag != NONE && !is_number(a[2]))) give_up(m, "the count of replace");
        most = a[2].tag == NONE || a[2].i < 0 ? -1 : a[2].i;
        const Value old = to_text(m, no_markup(m, a[0])), new = to_text(m, no_markup(m, a[1]));
        return replace(m, to_text(m, v), old, new, most);
    }
    default: { /* indent */
        if (v.tag != STRING) give_up(m, "indent of another type");
        const Value by = n > 0 ? indentation(m, a[0]) : spaces(m, 4);
        return indent(m, v, by, n > 1 && truth(m, a[1]), n > 2 && truth(m, a[2]));
    }
    }
}

Value run_filter(Machine *m, int filter, Value *a, int n, int extra) {
#define FILTER_NAME(x) #x,
    static const char *const names[] = {FILTERS(FILTER_NAME)};
    const Value v = a[0];
    int64_t number;
    if (is_of_text(filter) && (v.tag != STRING || !v.markup)) return filter_text(m, filter, v, a + 1, n - 1);
    switch (filter) {
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
    case FILTER_join: {
        const Value separator = n > 1 ? to_text(m, no_markup(m, a[1])) : LITERAL("");
        if (n < 3 || a[2].tag == NONE) return join(m, separator, v, false);
        Value all[] = {as_list(m, v, PLAIN_LIST, false), a[2], none()};
        return join(m, separator, filter_list(m, FILTER_map_attribute, all, 3, 0), false);
    }
    case FILTER_list: return as_list(m, v, PLAIN_LIST, false);
    case FILTER_first: {
        const Value list = iterate(m, v);
        return list.list->n ? list.list->v[0] : undefined();
    }
    case FILTER_last: return last(m, v);
    case FILTER_abs:
        if (v.tag == FLOAT || (is_number(v) && v.i != INT64_MIN))
            return v.tag == FLOAT ? (Value){.tag = FLOAT, .d = v.d < 0 ? -v.d : v.d + 0.0} : of_int(v.i < 0 ? -v.i : v.i);
        break;
    case FILTER_attr: return attribute(m, v, extra);
    case FILTER_int:
        if (is_number(v)) return of_int(v.i);
        if (v.tag == BIG) return unlabelled(m, v);
        if ((n < 3 || (a[2].tag == INT && a[2].i == 10)) && is_int_text(v, &number)) return of_int(number);
        break;
    case FILTER_tojson: return to_json(m, v, a + 1, n - 1);
    case FILTER_sort:
    case FILTER_dictsort:
    case FILTER_groupby:
    case FILTER_unique:
    case FILTER_min:
    case FILTER_max:
    case FILTER_sum:
    case FILTER_batch:
    case FILTER_slice:
    case FILTER_map_attribute:
    case FILTER_map_filter:
    case FILTER_select:
    case FILTER_reject:
    case FILTER_selectattr:
    case FILTER_rejectattr: return filter_list(m, filter, a, n, extra);
    default: break;
    }
    return by_python(m, "filter", names[filter], a, n);
}
