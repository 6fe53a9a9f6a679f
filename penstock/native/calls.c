/* Calls of macros, recursive loops and the methods of `loop`.
 *
 * A macro that is defined in another one reads that one's variables, through the call that defined it. Once this call has
 * ended, the macro can't be called any more, whereas in jinja2 it can. */

#include "constants.h"
#include "names.h"
#include "values.h"

/* ---- callees */

/* The macro as a value: with the number of the call that defines it, counted from 1, and that call's serial number. */
Value make_macro(const Machine *m, int32_t macro) {
    const int count = m->call_count;
    return (Value){
        .tag = MACRO, .size = count ? m->calls[count - 1].serial : 0, .i = (int64_t)count << 32 | (int64_t)macro};
}

typedef struct Callee {
    const Macro *macro;
    int32_t outer;
    uint32_t depth;
} Callee;

static Callee callee_of(Machine *m, const Program *p, Value v) {
    if (v.tag == MACRO) {
        const Macro *macro = &p->macros[v.i & INT32_MAX];
        const int32_t outer = macro->parent < 0 ? -1 : (int32_t)(v.i >> 32) - 1;
        if (outer >= 0 && (outer >= m->call_count || m->calls[outer].serial != v.size))
            give_up(m, "a macro of a call that has ended");
        return (Callee){macro, outer, 0};
    }
    if (v.tag != LOOP) give_up(m, "a call of something else than a macro");
    const Iteration *it = iteration_of(m, v);
    if (it->call < 0) give_up(m, "a call of a loop that is not recursive");
    const Call *call = &m->calls[it->call];
    return (Callee){call->macro, call->outer, it->depth + 1};
}

/* ---- arguments */

/* Remove a key from an object, and return its value; MISSING without it. */
static Value take_key(Machine *m, Dict *d, Value key) {
    const Value *found = look_up(m, d, key);
    if (!found) return of_tag(MISSING);
    const Value value = *found;
    Entry *e = (Entry *)((char *)found - offsetof(Entry, value));
    memmove(e, e + 1, (size_t)(d->e + d->n - (e + 1)) * sizeof *e);
    d->n--;
    return value;
}

static void add_named(Machine *m, Dict *named, Value name, Value value) {
    if (name.tag != STRING || (name.size && name.s[0] == '_')) give_up(m, "an argument with such a name");
    if (look_up(m, named, name)) give_up(m, "an argument that is given twice");
    set_key(m, named, name, value);
}

/* Any arguments for any macro, as jinja2's `Macro.__call__` distributes them. */
static void pass_all(Machine *m, const Macro *macro, Value *own, const Value *a, const int32_t *operands,
                     const List *names) {
    const int n = operands[0], named = operands[1], spread = operands[3];
    const List *const more = spread & STARRED_LIST ? iterate(m, a[n]).list : NULL;
    const Value *const values = a + n + (more != NULL);
    const uint32_t count = (uint32_t)n + (more ? more->n : 0);
    charge(m, 16 * (size_t)count);
    const Value places = of_list(m, count, TUPLE), rest = of_dict(m, (uint32_t)named);
    if (n) memcpy(places.list->v, a, (size_t)n * sizeof *a);
    if (more && more->n) memcpy(places.list->v + n, more->v, more->n * sizeof *a);
    for (int i = 0; i < named; i++) add_named(m, rest.dict, names->v[i], values[i]);
    if (spread & STARRED_DICT) {
        if (values[named].tag != DICT) give_up(m, "** of another type");
        const Dict *const d = values[named].dict;
        for (uint32_t i = 0; i < d->n; i++) add_named(m, rest.dict, d->e[i].key, d->e[i].value);
    }
    const uint32_t wanted = (uint32_t)macro->arguments;
    for (uint32_t i = 0; i < wanted; i++)
        own[i] = i < count ? places.list->v[i] : take_key(m, rest.dict, macro->names[i]);
    own += wanted;
    if (macro->takes & TAKES_CALLER) {
        const Value caller = take_key(m, rest.dict, keyed(LITERAL("caller")));
        *own++ = caller.tag == MISSING || caller.tag == NONE ? undefined() : caller;
    }
    if (macro->takes & TAKES_KWARGS)
        *own++ = rest;
    else if (rest.dict->n)
        give_up(m, "an unknown argument of a macro");
    if (macro->takes & TAKES_VARARGS) {
        *own = of_list(m, count > wanted ? count - wanted : 0, TUPLE);
        if (count > wanted) memcpy(own->list->v, places.list->v + wanted, (count - wanted) * sizeof *a);
    } else if (count > wanted) {
        give_up(m, "too many arguments of a macro");
    }
}

/* The arguments of a call become the macro's first locals; omitted ones are MISSING. */
static void pass_arguments(Machine *m, const Macro *macro, Value *own, const Value *a, const int32_t *operands,
                           const List *names) {
    const int n = operands[0], named = operands[1];
    for (int i = 0; i < macro->locals; i++) own[i] = of_tag(i < macro->arguments ? MISSING : UNDEFINED);
    if (macro->takes || operands[3]) {
        pass_all(m, macro, own, a, operands, names);
        return;
    }
    if (n > macro->arguments) give_up(m, "too many arguments of a macro");
    for (int i = 0; i < n; i++) own[i] = a[i];
    for (int i = 0; i < named; i++) {
        int k = n;
        while (k < macro->arguments && compare_text(names->v[i], macro->names[k])) k++;
        if (k == macro->arguments) give_up(m, "an unknown argument of a macro");
        own[k] = a[n + i];
    }
}

Call *begin_call(Machine *m, const Program *p, const Value *a, const int32_t *operands, Value *own) {
    const Callee callee = callee_of(m, p, *a);
    const Macro *const macro = callee.macro;
    if (m->call_count >= MAX_CALLS || m->stack + MAX_STACK - own < macro->locals + macro->depth)
        give_up(m, "calls nested too deeply");
    step(m);
    charge(m, 4 * (size_t)macro->size);
    pass_arguments(m, macro, own, a + 1, operands, p->constants[operands[2]].list);
    Call *const call = &m->calls[m->call_count++];
    *call = (Call){.own = own,
                   .macro = macro,
                   .outer = callee.outer,
                   .serial = ++m->serial,
                   .depth = callee.depth,
                   .start = m->out.n,
                   .span = m->spans.n};
    return call;
}

/* ---- methods of `loop` */

static bool has_changed(Machine *m, Iteration *it, const Value *a, uint32_t n) {
    if (m->guards) give_up(m, "a loop's filter that calls loop.changed");
    bool is_same = it->changed && it->changed->n == n;
    for (uint32_t i = 0; i < n && is_same; i++) is_same = equal(m, it->changed->v[i], a[i], 0);
    if (is_same) return false;
    const Value kept = of_list(m, n, TUPLE);
    if (n) memcpy(kept.list->v, a, n * sizeof *a);
    it->changed = kept.list;
    return true;
}

Value call_loop_method(Machine *m, Value method, const Value *a, const int32_t *operands) {
    Iteration *const it = iteration_of(m, method);
    if (operands[1] || operands[3]) give_up(m, "the arguments of a method of loop");
    const uint32_t n = (uint32_t)operands[0];
    step(m);
    if (method.markup == LOOP_CHANGED) return of_bool(has_changed(m, it, a, n));
    if (!n) give_up(m, "the arguments of a method of loop");
    return a[(it->index - 1) % n];
}
