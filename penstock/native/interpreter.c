/* The interpreter: runs a template's bytecode on the values of one conversation. It checks no operand and no depth of the
 * stack: `verify` has. */

#include "constants.h"
#include "names.h"
#include "values.h"

/* ---- loops */

static void end_iteration(Machine *m, Iteration *it) {
    if (m->capture_count > it->captures) { /* a break or continue inside a capture */
        drop_output(m, m->captures[it->captures]);
        m->capture_count = it->captures;
    }
    if (it->message >= 0) {
        assign_spans(m, it->start, it->span, it->message);
        it->message = -1;
        m->open_messages--;
    }
}

static void begin_loop(Machine *m, Value over) {
    const Value list = iterate(m, over);
    if (m->loop_count >= MAX_LOOPS) give_up(m, "loops nested too deeply");
    m->loops[m->loop_count++] = (Iteration){.v = list.list->v,
                                            .n = list.list->n,
                                            .serial = ++m->serial,
                                            .captures = m->capture_count,
                                            .call = -1,
                                            .message = -1};
}

static bool take_item(Machine *m, Iteration *it, Value *item) {
    end_iteration(m, it);
    if (it->i >= it->n) return false;
    step(m);
    *item = it->v[it->i++];
    return true;
}

static void begin_iteration(Machine *m, Iteration *it, Value item) {
    it->index++;
    it->start = m->out.n;
    it->span = m->spans.n;
    if (item.tag == DICT && item.dict->message >= 0) {
        it->message = item.dict->message;
        m->open_messages++;
    }
}

/* Take an item to test it; `accept_item` begins its iteration. */
static bool take_to_test(Machine *m, Iteration *it, Value *item) {
    if (!it->testing) it->is_owned = it->message >= 0;
    it->tests = it->testing = true;
    return take_item(m, it, item);
}

static void accept_item(Machine *m, Iteration *it) {
    if (!it->testing || !it->i) give_up(m, "an item of a loop's filter");
    it->testing = false;
    it->previous = it->current;
    it->current = it->v[it->i - 1];
    begin_iteration(m, it, it->current);
}

static void end_loop(Machine *m) {
    Iteration *it = &m->loops[m->loop_count - 1];
    end_iteration(m, it);
    it->serial = 0;
    m->loop_count--;
}

static Value end_filter(Machine *m) { /* the items that a loop's filter accepted */
    const Iteration *it = &m->loops[m->loop_count - 1];
    const Value kept = of_list(m, it->kept_count, GENERATOR);
    m->guards -= it->guarded;
    if (it->kept_count) memcpy(kept.list->v, it->kept, it->kept_count * sizeof(Value));
    end_loop(m);
    return kept;
}

static void keep_item(Machine *m, Value test) {
    Iteration *it = &m->loops[m->loop_count - 1];
    if (it->kept_count >= it->i) give_up(m, "an item of a loop's filter"); /* more than one for an item */
    if (!it->kept) it->kept = arena(m, it->n * sizeof(Value));
    if (truth(m, test)) it->kept[it->kept_count++] = it->v[it->i - 1];
}

static Value loop_variable(const Machine *m) {
    return (Value){.tag = LOOP, .i = m->loop_count - 1, .size = m->loops[m->loop_count - 1].serial};
}

/* ---- output */

static bool all_plain_text(const Value *a, int n) {
    for (int i = 0; i < n; i++)
        if (a[i].tag != STRING || a[i].markup) return false;
    return true;
}

static Value sum(Machine *m, const Value *a, int n) {
    Value total = a[0];
    if (n > 2 && all_plain_text(a, n)) { /* one copy instead of one for each + */
        size_t size = 0;
        for (int i = 0; i < n; i++) size += a[i].size;
        if (size > MAX_TEXT) give_up(m, "a string is too large");
        charge(m, size);
        char *text = arena(m, size + 1), *p = text;
        for (int i = 0; i < n; p += a[i++].size) {
            memcpy(p, a[i].s, a[i].size);
            copy_origin(m, a[i].s, a[i].size, p);
        }
        return of_string(text, size);
    }
    for (int i = 1; i < n; i++) total = add(m, total, a[i]);
    return total;
}

static void print_sum(Machine *m, const Value *a, int n) {
    const size_t start = m->out.n, first = m->spans.n;
    if (all_plain_text(a, n))
        for (int i = 0; i < n; i++) put_traced(m, a[i].s, a[i].size);
    else
        put_value(m, sum(m, a, n));
    claim_statement(m, start, first);
}

static void print_concat(Machine *m, const Value *a, int n) {
    const size_t start = m->out.n, first = m->spans.n;
    for (int i = 0; i < n; i++) put_value(m, a[i]);
    claim_statement(m, start, first);
}

static void begin_capture(Machine *m) {
    if (m->capture_count >= MAX_CAPTURES) give_up(m, "captures nested too deeply");
    m->captures[m->capture_count++] = m->out.n;
}

static Value end_capture(Machine *m) { return take_output(m, m->captures[--m->capture_count]); }

static void end_generation(Machine *m) {
    const size_t start = m->generations[--m->generation_count];
    if (m->capture_count || m->call_count) {
        m->lost = true;
        return;
    }
    for (int i = 0; i < TAG_COLUMNS; i++) APPEND(m, m->tags, m->conversation);
    int32_t *own = m->tags.at + m->tags.n - TAG_COLUMNS; /* nested blocks end earlier but begin later */
    const int32_t begin = (int32_t)(start - m->text_start);
    while (own > m->tags.at && own[TAG_ROW - TAG_COLUMNS] == m->conversation &&
           own[TAG_START - TAG_COLUMNS] > begin) {
        memcpy(own, own - TAG_COLUMNS, TAG_COLUMNS * sizeof *own);
        own -= TAG_COLUMNS;
    }
    own[TAG_START] = begin;
    own[TAG_END] = (int32_t)(m->out.n - m->text_start);
}

/* ---- variables of macros around this one */

static Value load_outer(const Machine *m, int32_t hops, int32_t slot) {
    int32_t at = m->call_count - 1;
    while (hops--) at = m->calls[at].outer;
    return m->calls[at].own[slot];
}

/* ---- ranges and comparisons */

static Value range(Machine *m, const Value *a, int n) {
    for (int i = 0; i < n; i++)
        if (!is_number(a[i]) || a[i].i > 1 << 30 || a[i].i < -(1 << 30)) give_up(m, "a range of other types");
    const int64_t low = n > 1 ? a[0].i : 0, high = a[n > 1].i, by = n == 3 ? a[2].i : 1;
    if (n < 1 || n > 3 || !by) give_up(m, "the arguments of range");
    const int64_t count = by > 0 ? (high > low ? (high - low - 1) / by + 1 : 0)
                                 : (low > high ? (low - high - 1) / -by + 1 : 0);
    if (count > MAX_RANGE) give_up(m, "a range of many numbers");
    const Value list = of_list(m, (uint32_t)count, RANGE);
    for (int64_t i = 0; i < count; i++) list.list->v[i] = of_int(low + i * by);
    return list;
}

typedef enum { IS_EQ, IS_NE, IS_LT, IS_LE, IS_GT, IS_GE, IS_IN, IS_NOT_IN } Comparison; /* in the order of operations */

static bool compare(Machine *m, int comparison, Value a, Value b) {
    switch (comparison) {
    case IS_EQ: return equal(m, a, b, 0);
    case IS_NE: return !equal(m, a, b, 0);
    case IS_LT: return order(m, a, b) < 0;
    case IS_LE: return order(m, a, b) <= 0;
    case IS_GT: return order(m, a, b) > 0;
    case IS_GE: return order(m, a, b) >= 0;
    case IS_IN: return contains(m, a, b);
    case IS_NOT_IN: return !contains(m, a, b);
    default: give_up(m, "a comparison");
    }
}

/* ---- constructing objects */

static Value make_dict(Machine *m, const Value *a, int n, Tag tag) {
    Value made = of_dict(m, (uint32_t)n + (tag == NAMESPACE ? 8 : 0));
    Dict *d = made.dict;
    for (int i = 0; i < n; i++) {
        const Value key = a[2 * i];
        if (key.tag == INT) { /* {0: 128, …} */
            for (uint32_t k = 0; k < d->n; k++)
                if (equal(m, d->e[k].key, key, 0)) give_up(m, "an object with a number as key twice");
            d->e[d->n++] = (Entry){key, a[2 * i + 1]};
        } else {
            if (key.tag != STRING) give_up(m, "an object with other keys");
            set_key(m, d, keyed(no_markup(m, key)), a[2 * i + 1]);
        }
    }
    made.tag = (uint8_t)tag;
    return made;
}

/* namespace(object, name=…), or namespace(name=…, **object). */
static Value make_namespace(Machine *m, const Value *a, int n, int spread) {
    if (!spread) return make_dict(m, a, n, NAMESPACE);
    const Value more = spread == STARRED_LIST ? a[0] : a[2 * n];
    if (more.tag != DICT || spread == (STARRED_LIST | STARRED_DICT)) give_up(m, "a namespace of other values");
    const Value own = make_dict(m, a + (spread == STARRED_LIST), n, DICT);
    const Value made = of_dict(m, more.dict->n + (uint32_t)n + 8);
    const Dict *const first = spread == STARRED_LIST ? more.dict : own.dict;
    const Dict *const second = spread == STARRED_LIST ? own.dict : more.dict;
    for (uint32_t i = 0; i < first->n + second->n; i++) {
        const Entry e = i < first->n ? first->e[i] : second->e[i - first->n];
        if (e.key.tag != STRING || (e.key.size && e.key.s[0] == '_')) give_up(m, "an underscore attribute");
        if (spread == STARRED_DICT && look_up(m, made.dict, e.key)) give_up(m, "an argument that is given twice");
        set_key(m, made.dict, e.key, e.value);
    }
    return (Value){.tag = NAMESPACE, .dict = made.dict};
}

/* text.split(separator)[0] or [-1], without the list. */
static Value split_at(Machine *m, Value s, Value separator, bool is_last) {
    if (s.tag != STRING || s.markup) give_up(m, "split of another type");
    charge(m, s.size);
    const char *p = s.s, *end = s.s + s.size, *q;
    if (!is_last) {
        q = find(m, p, s.size, separator.s, separator.size);
        return q ? of_string(p, (size_t)(q - p)) : s;
    }
    while ((q = find(m, p, (size_t)(end - p), separator.s, separator.size))) p = q + separator.size;
    return of_string(p, (size_t)(end - p));
}

static Value variable(Machine *m, const Dict *variables, Value name, Value otherwise) {
    const Value *own = variables ? look_up(m, variables, name) : NULL;
    if (own && otherwise.tag == FUNCTION) give_up(m, "a row's variable with the name of a function");
    return own ? *own : otherwise;
}

static _Noreturn void refuse(Machine *m, Value words) {
    if (m->guards) give_up(m, "an error in a loop's filter");
    if (words.tag != STRING || words.markup || memchr(words.s, 0, words.size)) give_up(m, "an error that is not text");
    m->refusal = words;
    m->refused = true;
    give_up(m, "the template refuses the row");
}

/* Record the direction of a branch, unless it was compared with the reference already. */
static inline bool branch(Machine *m, int32_t number, bool taken) {
    uint8_t *known = &m->branches[2 * number + taken];
    if (!*known) {
        *known = 2;
        APPEND(m, m->fresh, 2 * number + taken);
    }
    return taken;
}

/* ---- the interpreter */

#define PUSH(value)                                                                                                    \
    do {                                                                                                               \
        *sp = (value);                                                                                                 \
        sp++;                                                                                                          \
    } while (0)
#define CASE(name) case OP_##name
#define BINARY(expression)                                                                                             \
    do {                                                                                                               \
        sp--;                                                                                                          \
        const Value a = sp[-1], b = sp[0];                                                                             \
        sp[-1] = (expression);                                                                                         \
    } while (0)

void run(Machine *m, const Program *p, Value messages, Value tools, const Dict *variables) {
    Value *sp = m->stack, *locals = m->stack, *const globals = m->globals;
    const Value *const k = p->constants;
    const int32_t *pc = p->code;
    for (int i = 0; i < p->global_count; i++) globals[i] = undefined();
    for (;;) {
        const int32_t op = *pc++;
        switch (op) {
        CASE(CONST): PUSH(k[*pc++]); break;
        CASE(LOAD_GLOBAL): PUSH(globals[*pc++]); break;
        CASE(LOAD_LOCAL): PUSH(locals[*pc++]); break;
        CASE(STORE_GLOBAL): globals[*pc++] = *--sp; break;
        CASE(STORE_LOCAL): locals[*pc++] = *--sp; break;
        CASE(CLEAR_GLOBAL): globals[*pc++] = undefined(); break;
        CASE(CLEAR_LOCAL): locals[*pc++] = undefined(); break;
        CASE(MESSAGES): PUSH(messages); break;
        CASE(TOOLS): PUSH(tools); break;
        CASE(VARIABLE): PUSH(variable(m, variables, k[pc[0]], k[pc[1]])); pc += 2; break;
        CASE(POP): sp--; break;

        CASE(PRINT_CONST): put(m, k[*pc].s, k[*pc].size); pc++; break;
        CASE(PRINT): sp--; print_concat(m, sp, 1); break;
        CASE(PRINT_BLOCK): sp--; put_value(m, *sp); break;
        CASE(PRINT_SUM): sp -= *pc; print_sum(m, sp, *pc++); break;
        CASE(PRINT_CONCAT): sp -= *pc; print_concat(m, sp, *pc++); break;
        CASE(PRINT_JSON): sp -= *pc + 1; print_json(m, sp[0], sp + 1, *pc++); break;
        CASE(SUM): sp -= *pc; PUSH(sum(m, sp, *pc)); pc++; break;
        CASE(CONCAT): {
            const size_t mark = begin_text(m);
            sp -= *pc;
            for (int i = 0; i < *pc; i++) put_value(m, sp[i]);
            pc++;
            PUSH(end_text(m, mark));
            break;
        }

        CASE(ATTRIBUTE): sp[-1] = get_attribute(m, sp[-1], k[pc[0]], pc[1]); pc += 2; break;
        CASE(KEY): sp[-1] = get_key(m, sp[-1], k[pc[0]], pc[1]); pc += 2; break;
        CASE(ITEM): BINARY(get_item(m, a, b)); break;
        CASE(INDEX): sp[-1] = get_index(m, sp[-1], *pc++); break;
        CASE(SLICE): sp -= 3; sp[-1] = slice(m, sp[-1], sp[0], sp[1], sp[2]); break;
        CASE(SPLIT_AT): sp[-1] = split_at(m, sp[-1], k[pc[0]], pc[1]); pc += 2; break;
        CASE(METHOD): sp -= pc[1]; sp[-1] = call_method(m, sp[-1], pc[0], sp, pc[1]); pc += 2; break;
        CASE(FILTER): sp -= pc[1]; sp[0] = run_filter(m, pc[0], sp, pc[1], pc[2]); sp++; pc += 3; break;
        CASE(TEST): sp -= pc[1]; sp[-1] = of_bool(run_test(m, sp[-1], pc[0], sp, pc[1])); pc += 2; break;

        CASE(CALL):
        CASE(CALL_PRINT):
        CASE(CALL_BLOCK): {
            const int32_t *const a = pc;
            Value *const callee = sp - CALL_SIZE;
            pc += 4;
            if (callee->tag == LOOP_METHOD) {
                sp = callee;
                PUSH(call_loop_method(m, *callee, callee + 1, a));
                if (op != OP_CALL) sp--, print_concat(m, sp, 1);
                break;
            }
            Call *const call = begin_call(m, p, callee, a, sp);
            call->back = pc, call->locals = locals, call->stack = callee, call->op = op;
            if (op == OP_CALL) begin_capture(m);
            locals = sp;
            sp += call->macro->locals;
            pc = p->code + call->macro->entry;
            break;
        }
        CASE(MACRO): PUSH(make_macro(m, *pc++)); break;
        CASE(LOAD_OUTER): PUSH(load_outer(m, pc[0], pc[1])); pc += 2; break;
        CASE(LOAD_ARGUMENT): PUSH(locals[*pc].tag == MISSING ? undefined() : locals[*pc]); pc++; break;
        CASE(IN_SCOPE):
            if (sp[-1].tag == UNDEFINED) give_up(m, "a macro that reads a variable of a block that has ended");
            break;
        CASE(RETURN): {
            const Call call = m->calls[--m->call_count];
            pc = call.back;
            locals = call.locals;
            sp = call.stack;
            if (call.op == OP_CALL)
                PUSH(end_capture(m));
            else if (call.op == OP_CALL_PRINT)
                claim_statement(m, call.start, call.span);
            break;
        }
        CASE(ARGUMENT):
            if (branch(m, pc[2], locals[pc[0]].tag != MISSING))
                pc = p->code + pc[1];
            else
                pc += 3;
            break;

        CASE(JUMP): pc = p->code + *pc; break;
        CASE(JUMP_FALSE): sp--; pc = branch(m, pc[1], !truth(m, *sp)) ? p->code + pc[0] : pc + 2; break;
        CASE(JUMP_TRUE): sp--; pc = branch(m, pc[1], truth(m, *sp)) ? p->code + pc[0] : pc + 2; break;
        CASE(JUMP_FALSE_KEEP):
        CASE(JUMP_TRUE_KEEP):
            if (branch(m, pc[1], truth(m, sp[-1]) == (op == OP_JUMP_TRUE_KEEP))) {
                pc = p->code + pc[0];
            } else {
                sp--;
                pc += 2;
            }
            break;

        CASE(NOT): sp[-1] = of_bool(!truth(m, sp[-1])); break;
        CASE(EQ):
        CASE(NE):
        CASE(LT):
        CASE(LE):
        CASE(GT):
        CASE(GE):
        CASE(IN):
        CASE(NOT_IN): BINARY(of_bool(compare(m, op - OP_EQ, a, b))); break;
        CASE(CHAIN): { /* a < b < c: leaves b, or jumps to the end with False */
            sp--;
            const bool holds = compare(m, pc[0], sp[-1], sp[0]);
            sp[-1] = holds ? sp[0] : of_bool(false);
            pc = branch(m, pc[2], !holds) ? p->code + pc[1] : pc + 3;
            break;
        }
        CASE(EQ_TEXT):
        CASE(NE_TEXT):
            if (k[*pc].size > 256) charge(m, k[*pc].size);
            sp[-1] = of_bool(is_text(sp[-1], k[*pc].s, k[*pc].size) == (op == OP_EQ_TEXT));
            pc++;
            break;
        CASE(TEXT_IN): sp[-1] = of_bool(contains(m, k[*pc], sp[-1])); pc++; break;

        CASE(LOOP_BEGIN): sp--; begin_loop(m, *sp); break;
        CASE(LOOP_NEXT):
        CASE(LOOP_TAKE): {
            Value item;
            Iteration *const it = &m->loops[m->loop_count - 1];
            if (op == OP_LOOP_NEXT ? take_item(m, it, &item) : take_to_test(m, it, &item)) {
                if (op == OP_LOOP_NEXT) begin_iteration(m, it, item);
                charge(m, 4 * (size_t)(p->code + *pc - pc)); /* for the code of one iteration */
                PUSH(item);
                pc++;
            } else {
                pc = p->code + *pc;
            }
            break;
        }
        CASE(LOOP_ACCEPT): accept_item(m, &m->loops[m->loop_count - 1]); break;
        CASE(LOOP_DONE): m->loops[m->loop_count - 1].done = true; break;
        CASE(LOOP_ELSE): { /* pushes whether no iteration reached its end */
            const bool done = m->loops[m->loop_count - 1].done;
            end_loop(m);
            PUSH(of_bool(!done));
            break;
        }
        CASE(LOOP_RECURSIVE): {
            Iteration *const it = &m->loops[m->loop_count - 1];
            it->call = m->call_count - 1;
            it->depth = m->calls[it->call].depth;
            break;
        }
        CASE(LOOP_END): end_loop(m); break;
        CASE(FILTER_BEGIN): m->loops[m->loop_count - 1].guarded = true; m->guards++; break;
        CASE(FILTER_KEEP): sp--; keep_item(m, *sp); break;
        CASE(FILTER_END): PUSH(end_filter(m)); break;
        CASE(LOOP_GLOBAL): globals[*pc++] = loop_variable(m); break;
        CASE(LOOP_LOCAL): locals[*pc++] = loop_variable(m); break;
        CASE(UNPACK): {
            sp--;
            if (sp->tag != LIST && sp->tag != STRING) give_up(m, "unpacking of another type");
            const Value list = iterate(m, *sp);
            if (list.list->n != (uint32_t)*pc) give_up(m, "unpacking of another number of items");
            for (int i = *pc++ - 1; i >= 0; i--) PUSH(list.list->v[i]);
            break;
        }

        CASE(LIST):
        CASE(TUPLE): {
            const int n = *pc++;
            sp -= n;
            const Value list = of_list(m, (uint32_t)n, op == OP_LIST ? PLAIN_LIST : TUPLE);
            if (n) memcpy(list.list->v, sp, (size_t)n * sizeof(Value));
            PUSH(list);
            break;
        }
        CASE(DICT): sp -= 2 * *pc; PUSH(make_dict(m, sp, *pc, DICT)); pc++; break;
        CASE(NAMESPACE):
            sp -= 2 * pc[0] + SPREADS(pc[1]);
            PUSH(make_namespace(m, sp, pc[0], pc[1]));
            pc += 2;
            break;
        CASE(SET_ATTRIBUTE): /* value, namespace */
            sp -= 2;
            if (sp[1].tag != NAMESPACE) give_up(m, "an attribute set on another type");
            if (m->guards) give_up(m, "a loop's filter that changes a namespace");
            set_key(m, sp[1].dict, k[*pc++], sp[0]);
            break;

        CASE(CAPTURE): begin_capture(m); break;
        CASE(CAPTURE_END): PUSH(end_capture(m)); break;
        CASE(GENERATION):
            if (m->generation_count >= 64) give_up(m, "generation blocks nested too deeply");
            m->generations[m->generation_count++] = m->out.n;
            break;
        CASE(GENERATION_END): end_generation(m); break;

        CASE(SUBTRACT):
        CASE(MULTIPLY):
        CASE(MODULO):
        CASE(FLOOR_DIVIDE):
        CASE(DIVIDE):
        CASE(POWER): BINARY(arithmetic(m, op, a, b)); break;
        CASE(NEGATE): sp[-1] = negated(m, sp[-1]); break;
        CASE(RANGE): sp -= *pc; PUSH(range(m, sp, *pc)); pc++; break;

        CASE(REFUSE): refuse(m, sp[-1]);
        CASE(GIVE_UP): give_up(m, k[*pc].s);
        CASE(HALT): return;
        default: give_up(m, "an operation");
        }
    }
}
