/* Values of the template machine, the arena they live in, and the state of one render.
 *
 * Rule of the machine: exact bytes or give up. Whatever it does not do exactly as jinja2 does ends in `give_up`, a
 * longjmp to the row's start; the caller then renders that row with the reference. */
#ifndef PENSTOCK_VALUES_H
#define PENSTOCK_VALUES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One limit each; docs/templates.md lists them. */
enum {
    MAX_STACK = 8192,
    MAX_LOOPS = 256,     /* nested loops */
    MAX_CALLS = 200,     /* nested macro calls */
    MAX_CAPTURES = 512,  /* nested captures of output */
    MAX_DEPTH = 200,     /* nested JSON, and values made from it */
    MAX_LINEAR = 32,     /* keys of an object that are searched one by one; more are looked up in an index */
    MAX_DIGITS = 4000,   /* of an integer; Python's int() accepts 4300 */
    MAX_RANGE = 100000,  /* as in jinja2's sandbox */
};
#define MAX_TEXT ((size_t)64 << 20)   /* bytes of one rendered text, and of one string */
#define ARENA_BASE ((size_t)64 << 20) /* bytes of the arena, plus 64 for every byte of the row */
#define STEPS_BASE 2000000            /* loop steps and calls, plus 10 for every byte of the row */
#define WORK_BASE ((int64_t)1 << 30)  /* bytes searched and copied, plus 1000 for every byte of the row */
#define MAX_VECTOR ((size_t)256 << 20) /* bytes of one growing array: spans of text, values being parsed */

typedef enum {
    UNDEFINED, MISSING, NONE, BOOL, INT, BIG, FLOAT, STRING, LIST, DICT, NAMESPACE, MACRO, FUNCTION, METHOD, LOOP,
    LOOP_METHOD
} Tag;
typedef enum { PLAIN_LIST, TUPLE, RANGE, VIEW, GENERATOR, SPENT } ListKind; /* a generator can be used once */

typedef struct Value {
    uint8_t tag;
    uint8_t markup; /* of strings: Markup, from |safe; which LoopMethod */
    uint16_t hash;  /* of strings that are keys */
    uint32_t size;  /* bytes of a string or of a BIG integer's digits; serial of a loop, or of a macro's defining call;
                       label of lists, dicts, none and other numbers */
    union {
        int64_t i;
        double d;
        const char *s;
        struct List *list;
        struct Dict *dict;
    };
} Value;

typedef struct List {
    uint32_t n;
    uint8_t kind;
    bool is_group; /* a pair made by `groupby`, whose items have names */
    Value *v;
} List;

typedef struct Entry {
    Value key, value;
} Entry;

typedef struct Dict {
    uint32_t n, capacity;
    int32_t message; /* index of the message that this dict is, or -1 */
    Entry *e;
    struct Index *index; /* of a dict with many keys, made by the first look-up; NULL after any other change than set_key */
} Dict;

typedef struct Index { /* an open hash table: numbers of entries + 1, or 0 */
    uint32_t mask;
    uint32_t places[];
} Index;

/* Whether p points into [start, end). As numbers: C leaves comparing pointers into different objects undefined. */
static inline bool is_within(const char *p, const char *start, const char *end) {
    return (uintptr_t)p >= (uintptr_t)start && (uintptr_t)p < (uintptr_t)end;
}

/* ---- provenance: which message a run of bytes came from */

typedef struct Chunk { /* of the arena, with the entries of Machine.origins and Machine.labels that belong to it */
    struct Chunk *next;
    size_t capacity, used;
    size_t first_origin, last_origin, first_label, last_label;
    char data[];
} Chunk;

typedef struct Source { /* a message's bytes in the row, and in the decoded text of the row's strings */
    const char *raw, *raw_end, *decoded, *decoded_end;
    int32_t column, message;
} Source;

typedef struct Origin { /* bytes of the arena that were copied from a message; `looped` as in Span */
    const char *start;
    uint32_t size;
    uint32_t message : 31, looped : 1;
} Origin;

typedef struct Span { /* bytes of the output that belong to a message; `looped`: by an iteration over messages */
    size_t start, end;
    int32_t message;
    bool looped;
} Span;

/* Which field of an assistant's message text came from, with its mark; see penstock.prepare.template.turns.Field. */
typedef struct Label { /* of text in memory */
    const char *start, *end;
    uint32_t label;
} Label;

#define VECTOR(type) struct { type *at; size_t n, capacity; }
typedef VECTOR(Label) LabelVector;

typedef struct Run { /* of the output */
    size_t start, end;
    uint32_t label;
} Run;

typedef enum { ROW_TEXT, DECODED_TEXT, ARENA_TEXT, AREAS } Area; /* of memory; text that is in none has no label */

/* ---- the program */

typedef enum { LOOP_CYCLE, LOOP_CHANGED } LoopMethod;

typedef struct Macro { /* also the body of a call block, and a recursive loop */
    int32_t entry, arguments, locals;
    int32_t parent;      /* the macro that defines it and whose variables it reads, or -1 */
    int32_t takes;       /* TAKES_…, in this order in the locals after the arguments */
    int32_t size, depth; /* length of its code, and values that it has on the stack at most; both by `verify` */
    Value *names;
} Macro;

typedef struct Program {
    int32_t *code;
    Py_ssize_t code_size;
    Value *constants;
    int constant_count;
    Macro *macros;
    int macro_count, global_count, branch_count;
    Chunk *permanent; /* holds the constants */
} Program;

/* Check a program and fill in the sizes of its macros; returns what is wrong with it, or NULL (`verify.c`). */
#define NOT_VALID "bytecode that is not valid"
const char *verify(Program *p);

/* ---- the state of one render */

typedef struct Iteration {
    Value *v;
    uint32_t n, i;      /* number of items, and of those taken so far */
    uint32_t serial;    /* detects a loop variable that outlived its loop */
    int captures;       /* open when the loop began */
    Value *kept;        /* items accepted by the loop's filter */
    int32_t call;       /* of a recursive loop: the call that runs it; else -1 */
    uint32_t depth;     /* of a recursive loop */
    bool guarded;       /* see `Machine.guards` */
    bool tests;         /* items are tested one by one, so that nobody knows which are left */
    bool testing;       /* an item was taken, but not accepted yet */
    bool is_owned;      /* the iteration before the one being tested belonged to a message */
    bool done;          /* the end of the body was reached */
    uint32_t index;     /* number of iterations so far */
    Value current, previous; /* of a loop that tests its items: those accepted last */
    const List *changed; /* the last arguments of `loop.changed` */
    uint32_t kept_count;
    int32_t message;    /* the message of this iteration, or -1 */
    size_t start, span; /* lengths of output and spans when the iteration began */
} Iteration;

typedef struct Call {
    const int32_t *back;
    Value *locals, *stack; /* of the caller */
    Value *own;            /* its locals */
    const Macro *macro;
    int32_t outer;         /* the call that defined the macro, or -1 */
    uint32_t serial;       /* detects a macro that outlived the call which defined it */
    uint32_t depth;        /* of a recursive loop */
    int32_t op;            /* CALL, or one that prints its text instead of pushing it */
    size_t start, span;    /* lengths of output and spans when it began */
} Call;

typedef struct Machine {
    jmp_buf on_give_up;
    const char *why;      /* why the machine gave up */
    bool refused;         /* the template raised an exception; `refusal` has its message */
    Value refusal;
    Chunk *first, *current;
    size_t arena_size, arena_limit;
    char *decoded, *decoded_start; /* buffer for the row's decoded strings */
    size_t decoded_capacity;
    const char *json, *json_end, *row_start;
    VECTOR(Value) parsed; /* the parser's stack, and scratch space for growing lists */
    VECTOR(char) out;
    Value *stack, *globals;
    Iteration loops[MAX_LOOPS];
    int loop_count;
    int guards;        /* filters of loops that run before the body, whereas jinja2 runs them in between: nothing that the
                          body might change may be read, and nothing changed */
    uint32_t serial;
    Call calls[MAX_CALLS];
    int call_count;
    size_t captures[MAX_CAPTURES];
    int capture_count;
    size_t generations[64];
    int generation_count;
    int open_messages; /* current depth of iterations over messages */
    bool lost;         /* the text is exact, but its regions are uncertain */
    bool building;     /* what is written becomes a value, not output */
    int64_t steps, work;
    VECTOR(Source) sources;
    VECTOR(Origin) origins;
    LabelVector fields[AREAS];  /* of the row: sorted and disjoint */
    Label labelled[ARENA_TEXT]; /* from the first to the last of `fields` */
    LabelVector labels;         /* of strings made while rendering, ordered as their chunks of the arena */
    VECTOR(Run) runs;           /* of the output: sorted and disjoint */
    bool thinks;                /* the content of an assistant may have `<think>` or `</think>` */
    bool covered;               /* what is written lies in a value with a label, whose run covers it */
    VECTOR(Span) spans;
    VECTOR(Span) scratch;
    size_t text_start; /* of this conversation in `out` */
    const uint8_t *roles; /* of its messages */
    int32_t message_count;
    uint8_t *branches;    /* whether a branch was taken and compared with the reference: 0 no, 1 yes, 2 in this batch */
    VECTOR(int32_t) fresh; /* branches taken for the first time in this row */
    VECTOR(int32_t) tags;
    int32_t conversation; /* index in the batch */
    PyThreadState *thread; /* of the caller while the GIL is released, else NULL */
    PyObject *python;      /* performs what is left to Python, see `python.c`; or NULL */
    PyObject *held;        /* the last result of it, whose text may still be read */
    bool interrupted;      /* an exception such as KeyboardInterrupt is set and ends the batch */
} Machine;

_Noreturn void give_up(Machine *m, const char *why);

/* Make room for one more element. */
void *grown(Machine *m, void *array, size_t *capacity, size_t size);
#define RESERVE(m, vector)                                                                                             \
    do {                                                                                                               \
        if ((vector).n == (vector).capacity)                                                                           \
            (vector).at = grown(m, (vector).at, &(vector).capacity, sizeof *(vector).at);                              \
    } while (0)
#define APPEND(m, vector, ...)                                                                                         \
    do {                                                                                                               \
        RESERVE(m, vector);                                                                                            \
        (vector).at[(vector).n++] = (__VA_ARGS__);                                                                     \
    } while (0)

void *arena_slow(Machine *m, size_t size);
static inline void *arena(Machine *m, size_t size) {
    size = (size + 15) & ~(size_t)15;
    Chunk *c = m->current;
    if (c && c->capacity - c->used >= size) {
        void *p = c->data + c->used;
        c->used += size;
        return p;
    }
    return arena_slow(m, size);
}
void arena_reset(Machine *m, size_t limit);
void free_chunks(Chunk *chunk);

/* Charge for bytes processed, so that hostile templates terminate. */
static inline void charge(Machine *m, size_t bytes) {
    m->work -= (int64_t)bytes;
    if (m->work < 0) give_up(m, "too much work");
}
static inline void step(Machine *m) {
    if (--m->steps < 0) give_up(m, "too many steps");
}

/* ---- output */

void out_grow(Machine *m, size_t size);
static inline void put(Machine *m, const char *s, size_t n) {
    if (m->out.capacity - m->out.n < n) out_grow(m, n);
    if (n) memcpy(m->out.at + m->out.n, s, n);
    m->out.n += n;
}
static inline void put_char(Machine *m, char c) {
    if (m->out.n == m->out.capacity) out_grow(m, 1);
    m->out.at[m->out.n++] = c;
}
#define PUT(m, literal) put(m, literal, sizeof(literal) - 1)

/* ---- values */

static inline Value of_tag(Tag tag) { return (Value){.tag = (uint8_t)tag}; }
static inline Value undefined(void) { return of_tag(UNDEFINED); }
static inline Value none(void) { return of_tag(NONE); }
static inline Value of_int(int64_t i) { return (Value){.tag = INT, .i = i}; }
static inline Value of_bool(bool b) { return (Value){.tag = BOOL, .i = b}; }
static inline Value of_string(const char *s, size_t n) { return (Value){.tag = STRING, .size = (uint32_t)n, .s = s}; }
#define LITERAL(text) of_string(text, sizeof(text) - 1)
Value of_list(Machine *m, uint32_t n, ListKind kind);
Value of_dict(Machine *m, uint32_t capacity);

uint16_t hash_of(const char *s, uint32_t n);
static inline Value keyed(Value key) {
    key.hash = hash_of(key.s, key.size);
    return key;
}
static inline bool is_text(Value v, const char *s, size_t n) {
    return v.tag == STRING && v.size == n && !memcmp(v.s, s, n);
}
#define IS(v, literal) is_text(v, literal, sizeof(literal) - 1)
static inline bool is_number(Value v) { return v.tag == INT || v.tag == BOOL; }
static inline bool is_numeric(Value v) { return v.tag >= BOOL && v.tag <= FLOAT; }

static inline Value *find_key(const Dict *d, Value key) { /* a string with its hash */
    for (uint32_t i = 0; i < d->n; i++) {
        const Value *k = &d->e[i].key;
        if (k->hash == key.hash && k->size == key.size && k->tag == STRING && !memcmp(k->s, key.s, key.size))
            return &d->e[i].value;
    }
    return NULL;
}
Value *look_up_indexed(Machine *m, const Dict *d, Value key);
/* `find_key` for look-ups by templates; charges for large keys and dicts, because templates may repeat them. */
static inline Value *look_up(Machine *m, const Dict *d, Value key) {
    if (d->n > MAX_LINEAR) return look_up_indexed(m, d, key);
    if (d->n > 16 || key.size > 256) charge(m, 4 * (size_t)d->n + key.size);
    return find_key(d, key);
}
/* The place of a key in an index, or the empty one where it belongs. */
uint32_t *place_of(Machine *m, Index *index, const Entry *e, Value key);
/* An index of n entries with room for as many more; `MAX_LINEAR` or more. */
Index *index_of(Machine *m, const Entry *e, uint32_t n);
static inline bool is_full(const Index *index, uint32_t n) { return 2 * n > index->mask; }
void set_key(Machine *m, Dict *d, Value key, Value value);

bool truth(Machine *m, Value v);
bool equal(Machine *m, Value a, Value b, int depth);
int order(Machine *m, Value a, Value b); /* <0, 0, >0 */
int order_items(Machine *m, Value a, Value b); /* as items of lists: equal ones need no order */
int compare_text(Value a, Value b);
bool contains(Machine *m, Value item, Value container);
Value no_markup(Machine *m, Value v); /* gives up on Markup, whose methods escape */

/* ---- calls.c */

Value make_macro(const Machine *m, int32_t macro);
/* Begin the call of a macro or recursive loop: `a` is the callee with its arguments, `own` where its locals begin. */
Call *begin_call(Machine *m, const Program *p, const Value *a, const int32_t *operands, Value *own);
Value call_loop_method(Machine *m, Value method, const Value *a, const int32_t *operands);

/* ---- provenance */

/* The bytes [s, s+n) are about to be copied to `to`, or to the output if that is NULL; they keep their labels, too. */
void copy_origin(Machine *m, const char *s, size_t n, const char *to);
void add_origin(Machine *m, const char *start, size_t n, int32_t message, bool looped);
void assign_spans(Machine *m, size_t start, size_t first, int32_t message);
void claim_statement(Machine *m, size_t start, size_t first);
void drop_output(Machine *m, size_t mark);
void rewind_output(Machine *m, size_t mark); /* of text that has no origin */
Value take_output(Machine *m, size_t mark); /* turns the output since `mark` into a string */
/* Write a string with the origins of its parts. Such strings don't nest. */
static inline size_t begin_text(Machine *m) {
    m->building = true;
    return m->out.n;
}
static inline Value end_text(Machine *m, size_t mark) {
    m->building = false;
    return take_output(m, mark);
}
static inline void put_traced(Machine *m, const char *s, size_t n) {
    copy_origin(m, s, n, NULL);
    put(m, s, n);
}

/* ---- fields.c: labels. They have no influence on origins. */

uint32_t label_of_text(const Machine *m, const char *s, size_t n);
void copy_known_labels(Machine *m, const char *s, size_t n, const char *to);
static inline bool may_have_label(const Machine *m, const char *s, size_t n) {
    for (int area = 0; area < ARENA_TEXT; area++)
        if (is_within(s, m->labelled[area].start, m->labelled[area].end)) return n > 0;
    return n && (m->labels.n || m->fields[ARENA_TEXT].n);
}
/* The label of a number, list or dict, or the one that all of a text has; 0 without one. */
static inline uint32_t label_of(const Machine *m, Value v) {
    if (v.tag == STRING || v.tag == BIG) return may_have_label(m, v.s, v.size) ? label_of_text(m, v.s, v.size) : 0;
    return (v.tag >= NONE && v.tag <= FLOAT) || v.tag == LIST || v.tag == DICT ? v.size : 0;
}
/* The bytes [s, s+n) keep their labels when they are copied to `to`, or to the output if that is NULL. */
static inline void copy_labels(Machine *m, const char *s, size_t n, const char *to) {
    if (may_have_label(m, s, n)) copy_known_labels(m, s, n, to);
}
/* A text that was just made, which gets a label. */
Value with_label(Machine *m, Value made, uint32_t label);
/* What is written between these two has the label of v, unless it is inside of a value that has one. */
static inline uint32_t begin_label(Machine *m, Value v) {
    const uint32_t label = m->covered ? 0 : label_of(m, v);
    m->covered |= label != 0;
    return label;
}
void add_run(Machine *m, size_t start, size_t end, uint32_t label);
static inline void end_label(Machine *m, size_t start, uint32_t label) {
    if (!label) return;
    m->covered = false;
    if (m->out.n > start) add_run(m, start, m->out.n, label);
}
/* The labels of output since `mark` move to a copy of it, or are dropped if that is NULL. */
void take_labels(Machine *m, size_t mark, const char *to);
static inline void put_labelled(Machine *m, const char *s, size_t n) {
    copy_labels(m, s, n, NULL);
    put(m, s, n);
}

/* ---- characters, as the running interpreter defines them */

typedef enum { LOWER, UPPER, CAPITALIZE, TITLE, TITLE_FILTER } Case; /* of a text; of a character, the first three */
typedef struct CaseChange {
    uint8_t size;
    char bytes[11]; /* UTF-8 of up to three characters */
} CaseChange;
const CaseChange *case_change(Machine *m, uint32_t c, Case how);
bool is_cased(Machine *m, uint32_t c);
bool is_printable(Machine *m, uint32_t c);
bool is_wide_space(uint32_t c); /* beyond ASCII */
static inline bool is_space(uint32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
    return is_wide_space(c);
}
bool is_line_break(uint32_t c);

/* ---- text, with the semantics of Python's str */

uint32_t decode(const char *p, int *size); /* valid UTF-8 only */
int encode(char *p, uint32_t c);
bool is_utf8(const char *s, size_t n);
bool is_ascii(const char *s, size_t n);
size_t ascii_prefix(const char *s, size_t n); /* length of the ASCII prefix, rounded down to whole steps */
size_t count_points(const char *s, size_t n);
size_t point_offset(const char *s, size_t n, size_t index);
/* The caller charges for the text; this function charges for comparisons within it. */
const char *find(Machine *m, const char *text, size_t n, const char *wanted, size_t size);
/* Skip to the next quote, backslash or control character; sets `high` if a non-ASCII byte was passed. */
const char *scan_string(const char *p, const char *end, bool *high);
Value strip(Machine *m, Value s, const Value *chars, bool left, bool right);
Value split(Machine *m, Value s, const Value *separator, int64_t most);
Value split_right(Machine *m, Value s, const Value *separator, int64_t most);
Value split_lines_of(Machine *m, Value s, bool keep_ends);
Value partition(Machine *m, Value s, Value separator, bool at_last);
Value replace(Machine *m, Value s, Value old, Value new, int64_t most);
Value change_case(Machine *m, Value s, Case how);
Value indent(Machine *m, Value s, Value by, bool first, bool blank);
Value percent(Machine *m, Value s, Value arguments);
Value index_text(Machine *m, Value s, int64_t i);
Value slice(Machine *m, Value v, Value start, Value stop, Value step);

/* ---- JSON */

void json_begin(Machine *m, const char *row, size_t n);
Value json_row(Machine *m);          /* the whole row; elements of its lists become sources */
Value json_text(Machine *m, Value text, int32_t message); /* JSON inside a string of a message */
typedef struct JsonStyle {
    bool ascii, sorted, indented;
    Value indent, between, after_key;
} JsonStyle;
void put_json(Machine *m, Value v, const JsonStyle *style, int level);
Value dump_json(Machine *m, Value v);       /* json.dumps(v, ensure_ascii=False) */
void put_repr(Machine *m, Value v, int depth);
void put_value(Machine *m, Value v);        /* as {{ v }} prints it */
void put_unowned(Machine *m, Value v);      /* the same, without an origin */
/* Write what Python makes of a value; all of it has the value's label. */
void put_converted(Machine *m, const char *kind, const char *name, const Value *a, int n, Value v);
Value to_text(Machine *m, Value v);

/* ---- numbers */

Value add(Machine *m, Value a, Value b);
Value arithmetic(Machine *m, int op, Value a, Value b);
Value negated(Machine *m, Value v);

/* ---- operations */

Value get_attribute(Machine *m, Value v, Value name, int methods);
Value get_key(Machine *m, Value v, Value name, int methods);
Value get_item(Machine *m, Value v, Value key);
Iteration *iteration_of(Machine *m, Value loop); /* gives up if the loop has ended */
Value get_index(Machine *m, Value v, int64_t i);
Value iterate(Machine *m, Value v); /* the items of a loop over a value, as a list */
typedef enum { ITEMS, KEYS, VALUES } What;
Value entries(Machine *m, const Dict *d, What what, ListKind kind);
Value get_path(Machine *m, Value v, Value path, Value otherwise);
Value join(Machine *m, Value separator, Value items, bool only_text);
int64_t length(Machine *m, Value v);
void print_json(Machine *m, Value v, Value *a, int n);
Value call_method(Machine *m, Value v, int method, Value *a, int n);
Value run_filter(Machine *m, int filter, Value *a, int n, int extra);
bool run_test(Machine *m, Value v, int test, Value *a, int n);

/* ---- filters of lists; `a` has all arguments, the list first */

uint32_t *sorted_places(Machine *m, const Value *keys, uint32_t n, bool descending, bool as_items);
Value filter_list(Machine *m, int filter, Value *a, int n, int extra);

/* ---- Python */

/* Leaves an operation to Python, which gives a number, a plain text or None. The caller knows that it has no origin; it has
 * the label of the first argument. */
Value by_python(Machine *m, const char *kind, const char *name, const Value *a, int n);

void run(Machine *m, const Program *p, Value messages, Value tools, const Dict *variables);

#endif
