/* Arithmetic and order, as Python's operators define them. What C would round or overflow is left to Python. */

#include <math.h>

#include "names.h"
#include "values.h"

enum { MAX_LIST = 1 << 24 }; /* elements of a list that an operator makes */

static const char *symbol_of(int op) {
    switch (op) {
    case OP_SUM: return "+";
    case OP_SUBTRACT: return "-";
    case OP_MULTIPLY: return "*";
    case OP_DIVIDE: return "/";
    case OP_FLOOR_DIVIDE: return "//";
    case OP_MODULO: return "%";
    default: return "**";
    }
}

static Value by_operator(Machine *m, int op, Value a, Value b) {
    const Value both[] = {a, b};
    return by_python(m, "operator", symbol_of(op), both, 2);
}

static bool is_exact(Value v) { /* as a double */
    return v.tag == FLOAT || (is_number(v) && v.i <= (int64_t)1 << 53 && v.i >= -((int64_t)1 << 53));
}

static double as_double(Value v) { return v.tag == FLOAT ? v.d : (double)v.i; }

/* ---- text and lists */

static bool is_unsafe(char c) { return c == '&' || c == '<' || c == '>' || c == '\'' || c == '"'; }

static void put_markup(Machine *m, Value v) { /* markupsafe escapes the side that is plain */
    if (v.markup) {
        put_labelled(m, v.s, v.size);
        return;
    }
    for (uint32_t i = 0, kept = 0; i <= v.size; i++) {
        if (i < v.size && !is_unsafe(v.s[i])) continue;
        put_labelled(m, v.s + kept, i - kept);
        kept = i + 1;
        if (i == v.size) break;
        const size_t start = m->out.n;
        const uint32_t label = begin_label(m, (Value){.tag = STRING, .s = v.s + i, .size = 1});
        switch (v.s[i]) {
        case '&': PUT(m, "&amp;"); break;
        case '<': PUT(m, "&lt;"); break;
        case '>': PUT(m, "&gt;"); break;
        case '\'': PUT(m, "&#39;"); break;
        default: PUT(m, "&#34;");
        }
        end_label(m, start, label);
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

static Value add_lists(Machine *m, const List *a, const List *b) {
    const size_t n = (size_t)a->n + b->n;
    if (n > MAX_LIST) give_up(m, "a list is too long");
    charge(m, n * sizeof(Value));
    const Value sum = of_list(m, (uint32_t)n, (ListKind)a->kind);
    if (a->n) memcpy(sum.list->v, a->v, a->n * sizeof(Value));
    if (b->n) memcpy(sum.list->v + a->n, b->v, b->n * sizeof(Value));
    return sum;
}

static Value repeat_text(Machine *m, Value text, int64_t times) {
    no_markup(m, text);
    if (times < 0 || !text.size) times = 0;
    if (text.size && (uint64_t)times > MAX_TEXT / text.size) give_up(m, "a string is too large");
    const size_t mark = m->out.n;
    for (int64_t i = 0; i < times; i++) put_labelled(m, text.s, text.size);
    return take_output(m, mark);
}

static Value repeat_list(Machine *m, const List *list, int64_t times) {
    if (times < 0 || !list->n) times = 0;
    if (list->n && times > MAX_LIST / (int64_t)list->n) give_up(m, "a list is too long");
    const Value made = of_list(m, list->n * (uint32_t)times, (ListKind)list->kind);
    charge(m, made.list->n * sizeof(Value));
    for (uint32_t i = 0; i < made.list->n; i++) made.list->v[i] = list->v[i % list->n];
    return made;
}

/* ---- numbers */

Value add(Machine *m, Value a, Value b) {
    int64_t sum;
    if (a.tag == STRING && b.tag == STRING) return add_text(m, a, b);
    if (is_number(a) && is_number(b) && !__builtin_add_overflow(a.i, b.i, &sum)) return of_int(sum);
    if (a.tag == LIST && b.tag == LIST && a.list->kind == b.list->kind && a.list->kind <= TUPLE)
        return add_lists(m, a.list, b.list);
    if (!is_numeric(a) || !is_numeric(b)) give_up(m, "+ of other types");
    if (is_exact(a) && is_exact(b) && (a.tag == FLOAT || b.tag == FLOAT))
        return (Value){.tag = FLOAT, .d = as_double(a) + as_double(b)};
    return by_operator(m, OP_SUM, a, b);
}

static bool int_power(int64_t base, int64_t exponent, int64_t *power) {
    *power = 1;
    for (int64_t i = 0; i < exponent; i++)
        if (__builtin_mul_overflow(*power, base, power)) return false;
    return true;
}

/* False where the result is no integer of 64 bits. */
static bool int_arithmetic(int op, int64_t a, int64_t b, int64_t *result) {
    switch (op) {
    case OP_SUBTRACT: return !__builtin_sub_overflow(a, b, result);
    case OP_MULTIPLY: return !__builtin_mul_overflow(a, b, result);
    case OP_POWER: return b >= 0 && b < 64 && int_power(a, b, result);
    case OP_MODULO:
    case OP_FLOOR_DIVIDE: { /* Python rounds towards minus infinity */
        if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
        const int64_t rest = a % b;
        const bool is_below = rest && (rest < 0) != (b < 0);
        *result = op == OP_MODULO ? rest + (is_below ? b : 0) : a / b - is_below;
        return true;
    }
    default: return false;
    }
}

static Value float_arithmetic(Machine *m, int op, Value a, Value b) {
    const double x = as_double(a), y = as_double(b);
    switch (op) {
    case OP_SUBTRACT: return (Value){.tag = FLOAT, .d = x - y};
    case OP_MULTIPLY: return (Value){.tag = FLOAT, .d = x * y};
    case OP_DIVIDE:
        if (y != 0) return (Value){.tag = FLOAT, .d = x / y};
        break;
    default: break;
    }
    return by_operator(m, op, a, b);
}

Value arithmetic(Machine *m, int op, Value a, Value b) {
    int64_t result;
    if (op == OP_MODULO && a.tag == STRING) return percent(m, a, b);
    if (op == OP_MULTIPLY) {
        if (is_number(b) && a.tag == STRING) return repeat_text(m, a, b.i);
        if (is_number(a) && b.tag == STRING) return repeat_text(m, b, a.i);
        if (is_number(b) && a.tag == LIST && a.list->kind <= TUPLE) return repeat_list(m, a.list, b.i);
        if (is_number(a) && b.tag == LIST && b.list->kind <= TUPLE) return repeat_list(m, b.list, a.i);
    }
    if (!is_numeric(a) || !is_numeric(b)) give_up(m, "arithmetic of other types than numbers");
    if (is_number(a) && is_number(b) && int_arithmetic(op, a.i, b.i, &result)) return of_int(result);
    if (is_exact(a) && is_exact(b) && (a.tag == FLOAT || b.tag == FLOAT || op == OP_DIVIDE))
        return float_arithmetic(m, op, a, b);
    return by_operator(m, op, a, b);
}

Value negated(Machine *m, Value v) {
    if (v.tag == FLOAT) return (Value){.tag = FLOAT, .d = -v.d};
    return arithmetic(m, OP_SUBTRACT, of_int(0), v);
}

/* ---- order */

static int order_lists(Machine *m, const List *a, const List *b) {
    if (a->kind > TUPLE || a->kind != b->kind) give_up(m, "an order of ranges, views or other types");
    for (uint32_t i = 0; i < a->n && i < b->n; i++)
        if (!equal(m, a->v[i], b->v[i], 0)) return order(m, a->v[i], b->v[i]);
    return (a->n > b->n) - (a->n < b->n);
}

static int order_numbers(Machine *m, Value a, Value b) {
    if (is_number(a) && is_number(b)) return (a.i > b.i) - (a.i < b.i);
    if ((a.tag == FLOAT && isnan(a.d)) || (b.tag == FLOAT && isnan(b.d))) give_up(m, "an order of NaN");
    if (is_exact(a) && is_exact(b)) {
        const double x = as_double(a), y = as_double(b);
        return (x > y) - (x < y);
    }
    const Value both[] = {a, b};
    return (int)by_python(m, "operator", "order", both, 2).i;
}

int order(Machine *m, Value a, Value b) {
    if (a.tag == STRING && b.tag == STRING) {
        charge(m, a.size);
        return compare_text(a, b);
    }
    if (is_numeric(a) && is_numeric(b)) return order_numbers(m, a, b);
    if (a.tag == LIST && b.tag == LIST) {
        charge(m, 64);
        return order_lists(m, a.list, b.list);
    }
    give_up(m, "an order of other types than numbers, text and lists");
}

int order_items(Machine *m, Value a, Value b) { return equal(m, a, b, 0) ? 0 : order(m, a, b); }
