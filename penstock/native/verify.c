/* Checks bytecode once, on loading, so that the interpreter need not: damaged code is refused before it can run.
 *
 * All paths are followed, from the start of the template and of each macro. Whichever way an operation is reached, the
 * depth of the stack and the open blocks (loops, captures and generation blocks) are the same. A jump leads forward, or
 * back to LOOP_NEXT, which takes a step each time, so code ends. A program takes one pass over its code. */

#include "names.h"
#include "values.h"

#define OPERANDS(name, operands, pops, pushes) operands,
static const char *const operand_kinds[] = {OPS(OPERANDS)};
#undef OPERANDS

typedef struct State { /* in which an operation is reached */
    int32_t depth;     /* values of this template or macro on the stack; -1: not reached yet */
    int32_t block;     /* the operation that began the innermost open block, or -1 */
    int32_t macro;     /* the macro whose code it is, or -1 */
} State;

typedef struct Walk {
    const Program *p;
    State *states;    /* by place in the code; of operations only */
    bool *starts;     /* whether an operation begins at a place */
    int32_t *pending; /* operations reached, but not followed yet */
    size_t pending_count;
    int32_t macro;
    int32_t size, deepest; /* of the macro, so far */
} Walk;

static int32_t op_at(const Walk *w, int32_t at) { return at < 0 ? -1 : w->p->code[at]; }

/* Find where operations begin; false if one is unknown or truncated, or the last one does not end the code. */
static bool find_starts(Walk *w) {
    Py_ssize_t at = 0;
    int32_t op = -1;
    while (at < w->p->code_size) {
        op = w->p->code[at];
        if (op < 0 || op >= OP_COUNT) return false;
        w->starts[at] = true;
        at += 1 + (Py_ssize_t)strlen(operand_kinds[op]);
    }
    return at == w->p->code_size && (op == OP_HALT || op == OP_RETURN);
}

/* ---- operands */

static bool is_list_of_text(Value v, int32_t n) {
    if (v.tag != LIST || v.list->n != (uint32_t)n) return false;
    for (uint32_t i = 0; i < v.list->n; i++)
        if (v.list->v[i].tag != STRING) return false;
    return true;
}

static bool is_operand(const Walk *w, char kind, const int32_t *operand) {
    const Program *p = w->p;
    const int32_t i = *operand;
    if (kind == 'i') return true;
    if (i < 0) return false;
    switch (kind) {
    case 'c': return i < p->constant_count;
    case 's': return i < p->constant_count && p->constants[i].tag == STRING;
    case 'w': return i < p->constant_count && p->constants[i].tag == STRING && p->constants[i].size;
    case 'k': return i < p->constant_count && is_list_of_text(p->constants[i], operand[-1]);
    case 'g': return i < p->global_count;
    case 'l': return w->macro >= 0 && i < p->macros[w->macro].locals;
    case 'j': return i < p->code_size && w->starts[i];
    case 'b': return i < p->branch_count;
    case 'm': return i < METHOD_COUNT;
    case 'f': return i < FILTER_COUNT;
    case 't': return i < TEST_COUNT;
    case 'p': return i > 0 && i < MAX_STACK;
    case 'u': return i <= (STARRED_LIST | STARRED_DICT);
    case 'x': return i < p->macro_count && p->macros[i].parent == w->macro;
    default: return i < MAX_STACK;
    }
}

static void stack_effect(int32_t op, const int32_t *a, int32_t *popped, int32_t *pushed) {
    switch (op) {
#define EFFECT(name, operands, pops, pushes)                                                                           \
    case OP_##name: *popped = (pops), *pushed = (pushes); break;
        OPS(EFFECT)
#undef EFFECT
    }
}

/* ---- paths */

static bool takes_item(int32_t op) { return op == OP_LOOP_NEXT || op == OP_LOOP_TAKE; }
static bool ends_loop(int32_t op) { return op == OP_LOOP_END || op == OP_LOOP_ELSE || op == OP_FILTER_END; }

/* Follow a path to an operation; false if the code ends before it, or another path reaches it in another state. */
static bool reach(Walk *w, int32_t at, int32_t depth, int32_t block) {
    if (at >= w->p->code_size) return false;
    const int32_t op = op_at(w, at);
    if (takes_item(op) || ends_loop(op)) /* break and continue leave captures */
        while (op_at(w, block) == OP_CAPTURE) block = w->states[block].block;
    State *state = &w->states[at];
    if (state->depth >= 0) return state->depth == depth && state->block == block && state->macro == w->macro;
    *state = (State){depth, block, w->macro};
    w->pending[w->pending_count++] = at;
    if (depth > w->deepest) w->deepest = depth;
    return depth <= MAX_STACK;
}

static bool jump(Walk *w, int32_t from, int32_t to, int32_t depth, int32_t block) {
    return (to > from || takes_item(op_at(w, to))) && reach(w, to, depth, block);
}

static bool is_in_loop(const Walk *w, int32_t block) {
    while (block >= 0 && op_at(w, block) != OP_LOOP_BEGIN) block = w->states[block].block;
    return block >= 0;
}

/* Whether the macro that is `hops` around this one has such a local. */
static bool is_outer(const Walk *w, int32_t hops, int32_t slot) {
    int32_t macro = w->macro;
    while (macro >= 0 && hops--) macro = w->p->macros[macro].parent;
    return macro >= 0 && slot < w->p->macros[macro].locals;
}

/* Check one operation, and follow the paths from it. */
static bool follow(Walk *w, int32_t at) {
    const int32_t op = op_at(w, at), *a = w->p->code + at + 1;
    const char *kinds = operand_kinds[op];
    const int32_t next = at + 1 + (int32_t)strlen(kinds), inner = w->states[at].block;
    for (int i = 0; kinds[i]; i++)
        if (!is_operand(w, kinds[i], a + i)) return false;
    int32_t popped = 0, pushed = 0, block = inner;
    stack_effect(op, a, &popped, &pushed);
    if (w->states[at].depth < popped) return false;
    const int32_t depth = w->states[at].depth - popped + pushed;
    w->size += next - at;
    switch (op) {
    case OP_HALT: return w->macro < 0 && !depth && inner < 0;
    case OP_RETURN: return w->macro >= 0 && !depth && inner < 0;
    case OP_JUMP: return jump(w, at, a[0], depth, inner);
    case OP_JUMP_FALSE:
    case OP_JUMP_TRUE:
        if (!jump(w, at, a[0], depth, inner)) return false;
        break;
    case OP_JUMP_FALSE_KEEP:
    case OP_JUMP_TRUE_KEEP:
        if (!jump(w, at, a[0], depth + 1, inner)) return false;
        break;
    case OP_CHAIN:
    case OP_ARGUMENT:
        if (!jump(w, at, a[1], depth, inner)) return false;
        break;
    case OP_LOOP_NEXT:
    case OP_LOOP_TAKE: /* at its end a loop is left: else code could come back to it for ever */
        if (op_at(w, inner) != OP_LOOP_BEGIN || a[0] <= at) return false;
        if (!ends_loop(op_at(w, a[0]))) return false;
        if (!jump(w, at, a[0], depth - 1, inner)) return false;
        break;
    case OP_LOOP_BEGIN:
    case OP_CAPTURE:
    case OP_GENERATION: block = at; break;
    case OP_LOOP_END:
    case OP_LOOP_ELSE:
    case OP_FILTER_END:
    case OP_CAPTURE_END:
    case OP_GENERATION_END: {
        const int32_t begun = op == OP_CAPTURE_END      ? OP_CAPTURE
                              : op == OP_GENERATION_END ? OP_GENERATION
                                                        : OP_LOOP_BEGIN;
        if (op_at(w, inner) != begun) return false;
        block = w->states[inner].block;
        break;
    }
    case OP_LOAD_OUTER:
        if (!is_outer(w, a[0], a[1])) return false;
        break;
    case OP_LOOP_RECURSIVE:
        if (w->macro < 0 || !is_in_loop(w, inner)) return false;
        break;
    case OP_LOOP_ACCEPT:
    case OP_LOOP_DONE:
    case OP_FILTER_BEGIN:
    case OP_FILTER_KEEP:
    case OP_LOOP_GLOBAL:
    case OP_LOOP_LOCAL:
        if (!is_in_loop(w, inner)) return false;
        break;
    default: break;
    }
    return reach(w, next, depth, block);
}

static bool walk(Walk *w, int32_t macro, int32_t entry) {
    w->macro = macro;
    w->size = w->deepest = 0;
    if (!reach(w, entry, 0, -1)) return false;
    while (w->pending_count)
        if (!follow(w, w->pending[--w->pending_count])) return false;
    return true;
}

/* How many locals a macro receives after its arguments. */
static int32_t taken(int32_t takes) {
    return (takes & TAKES_CALLER) / TAKES_CALLER + (takes & TAKES_KWARGS) / TAKES_KWARGS +
           (takes & TAKES_VARARGS) / TAKES_VARARGS;
}

static const char *verify_code(Program *p, Walk *w) {
    if (!find_starts(w)) return NOT_VALID;
    for (int32_t i = -1; i < p->macro_count; i++) {
        Macro own = {.parent = -1}, *macro = i < 0 ? &own : &p->macros[i];
        if (macro->entry < 0 || macro->entry >= p->code_size || !w->starts[macro->entry]) return NOT_VALID;
        if (macro->arguments < 0 || macro->locals > MAX_STACK / 2) return NOT_VALID;
        if (macro->arguments > macro->locals - taken(macro->takes)) return NOT_VALID;
        if (macro->parent < -1 || macro->parent >= (i < 0 ? 0 : i)) return NOT_VALID;
        if (!walk(w, i, macro->entry)) return w->deepest > MAX_STACK ? "an expression that is too large" : NOT_VALID;
        macro->size = w->size;
        macro->depth = w->deepest;
    }
    return NULL;
}

const char *verify(Program *p) {
    const size_t n = (size_t)p->code_size;
    Walk w = {.p = p};
    w.states = malloc(n * sizeof *w.states);
    w.starts = calloc(n, sizeof *w.starts);
    w.pending = malloc(n * sizeof *w.pending);
    const char *wrong = "too much memory";
    if (w.states && w.starts && w.pending) {
        for (size_t i = 0; i < n; i++) w.states[i].depth = -1;
        wrong = n < INT32_MAX ? verify_code(p, &w) : NOT_VALID;
    }
    free(w.states), free(w.starts), free(w.pending);
    return wrong;
}
