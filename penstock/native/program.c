/* A compiled template as a Python object: loads bytecode, renders batches of rows with the GIL released. */

#include "batch.h"
#include "names.h"
#include "native.h"

#include <locale.h>
#include <math.h>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

/* ---- constants: Python values converted into an arena that lives as long as the program */

static Value big_of_python(Machine *m, PyObject *o) {
    char digits[MAX_DIGITS + 1];
    Py_ssize_t n = 0;
    PyObject *text = PyObject_Str(o);
    const char *s = text ? PyUnicode_AsUTF8AndSize(text, &n) : NULL;
    const bool fits = s && n <= MAX_DIGITS;
    if (fits) memcpy(digits, s, (size_t)n);
    Py_XDECREF(text);
    if (!fits) PyErr_Clear();
    if (!fits) give_up(m, "an integer of more than 4000 digits");
    char *copy = arena(m, (size_t)n);
    memcpy(copy, digits, (size_t)n);
    Value found = of_string(copy, (size_t)n);
    found.tag = BIG;
    return found;
}

static Value of_python(Machine *m, PyObject *o) {
    if (o == Py_None) return none();
    if (o == Py_Ellipsis) return undefined();
    if (PyBool_Check(o)) return of_bool(o == Py_True);
    if (PyLong_Check(o)) {
        int overflow;
        const long long i = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (overflow) return big_of_python(m, o);
        return of_int(i);
    }
    if (PyFloat_Check(o)) return (Value){.tag = FLOAT, .d = PyFloat_AsDouble(o)};
    if (PyUnicode_Check(o)) {
        Py_ssize_t n;
        const char *s = PyUnicode_AsUTF8AndSize(o, &n);
        if (!s || (size_t)n > MAX_TEXT) {
            PyErr_Clear();
            give_up(m, "text that is not UTF-8, or too large");
        }
        char *copy = arena(m, (size_t)n + 1);
        memcpy(copy, s, (size_t)n + 1);
        return keyed(of_string(copy, (size_t)n));
    }
    if (PyList_Check(o) || PyTuple_Check(o)) {
        const bool plain = PyList_Check(o);
        const Py_ssize_t n = plain ? PyList_Size(o) : PyTuple_Size(o);
        const Value list = of_list(m, (uint32_t)n, plain ? PLAIN_LIST : TUPLE);
        for (Py_ssize_t i = 0; i < n; i++)
            list.list->v[i] = of_python(m, plain ? PyList_GetItem(o, i) : PyTuple_GetItem(o, i));
        return list;
    }
    if (PyDict_Check(o)) {
        PyObject *key, *value;
        Py_ssize_t at = 0;
        const Value dict = of_dict(m, (uint32_t)PyDict_Size(o));
        while (PyDict_Next(o, &at, &key, &value)) {
            if (!PyUnicode_Check(key)) give_up(m, "an object with other keys than strings");
            const Value name = of_python(m, key);
            set_key(m, dict.dict, name, of_python(m, value));
        }
        return dict;
    }
    if (PyFrozenSet_Check(o)) return of_tag(FUNCTION); /* {"range"}: a jinja2 function */
    give_up(m, "a constant of another type");
}

static Value field(Machine *m, Value layout, const char *name) {
    const Value *found = find_key(layout.dict, keyed(of_string(name, strlen(name))));
    if (!found) give_up(m, "the layout of rows is not complete");
    return *found;
}

static Value typed(Machine *m, Value layout, const char *name, Tag tag) {
    const Value found = field(m, layout, name);
    if (found.tag != tag) give_up(m, "the layout of rows has a field of another type");
    return found;
}

static void load_layout(Machine *m, Layout *l, PyObject *given) {
    const Value v = of_python(m, given);
    if (v.tag != DICT) give_up(m, "the layout of rows is a dict");
#define TEXT(name) l->name = typed(m, v, #name, STRING)
#define NAMES(name) l->name = typed(m, v, #name, LIST)
#define FLAG(name) l->name = truth(m, field(m, v, #name))
    l->reading = typed(m, v, "reading", INT).i;
    TEXT(messages), TEXT(tools), TEXT(system), TEXT(variables), TEXT(query), TEXT(input), TEXT(response), TEXT(history);
    TEXT(role_key), TEXT(content_key), TEXT(inverse_weight_key);
    NAMES(media), NAMES(weight_keys), NAMES(text_for_null), NAMES(text_for_missing), NAMES(no_part), NAMES(no_parts);
    NAMES(no_text), NAMES(near), NAMES(needles), NAMES(reserved);
    l->roles = typed(m, v, "roles", DICT), l->used_keys = typed(m, v, "used_keys", DICT);
    FLAG(object_arguments), FLAG(string_arguments), FLAG(wrapped_calls), FLAG(typed_calls), FLAG(no_empty_calls);
    FLAG(null_with_calls), FLAG(wrapped_tools), FLAG(bare_tools);
    l->adapts_calls = l->object_arguments || l->string_arguments || l->wrapped_calls || l->typed_calls ||
                      l->no_empty_calls || l->null_with_calls;
    for (uint32_t i = 0; i < l->needles.list->n; i++) {
        const Value needle = l->needles.list->v[i];
        if (needle.tag != STRING || needle.size < 2) give_up(m, "a text to look for has less than two bytes");
        const uint8_t start = (uint8_t)needle.s[0];
        if (!memchr(l->needle_starts, start, l->needle_start_count)) l->needle_starts[l->needle_start_count++] = start;
        l->needle_pairs[byte_pair(needle.s)] = true;
    }
}

/* ---- loading */

static bool load_macros(Machine *m, Program *p, PyObject *macros) { /* (entry, arguments, locals, parent, …) */
    for (int i = 0; i < p->macro_count; i++) {
        PyObject *names;
        Macro *macro = &p->macros[i];
        if (!PyArg_ParseTuple(PyList_GetItem(macros, i), "iiiiiO!", &macro->entry, &macro->arguments, &macro->locals,
                              &macro->parent, &macro->takes, &PyTuple_Type, &names))
            return false;
        if (PyTuple_Size(names) != macro->arguments) give_up(m, "a macro's names");
        const Value list = of_python(m, names);
        for (uint32_t k = 0; k < list.list->n; k++)
            if (list.list->v[k].tag != STRING) give_up(m, "a macro's names");
        macro->names = list.list->v;
    }
    return true;
}

static bool load(ProgramObject *self, Py_buffer *code, PyObject *constants, PyObject *macros, PyObject *layout) {
    Program *p = &self->program;
    Machine loader; /* only its arena is used */
    memset(&loader, 0, sizeof loader);
    loader.work = INT64_MAX;
    if (setjmp(loader.on_give_up)) {
        p->permanent = loader.first;
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, loader.why);
        return false;
    }
    for (int i = 0; i < p->constant_count; i++) p->constants[i] = of_python(&loader, PyList_GetItem(constants, i));
    const bool loaded = load_macros(&loader, p, macros);
    if (loaded) load_layout(&loader, &self->layout, layout);
    p->permanent = loader.first;
    free(loader.origins.at);
    if (!loaded) return false;
    memcpy(p->code, code->buf, (size_t)code->len);
    const char *wrong = verify(p);
    if (wrong) PyErr_SetString(PyExc_ValueError, wrong);
    return !wrong;
}

static void dealloc(ProgramObject *self) {
    Machine *m = self->machine;
    if (m) {
        Py_XDECREF(m->python), Py_XDECREF(m->held);
        free_chunks(m->first);
        free(m->decoded_start), free(m->parsed.at), free(m->out.at), free(m->stack), free(m->globals);
        free(m->sources.at), free(m->origins.at), free(m->spans.at), free(m->scratch.at);
        free(m->labels.at), free(m->runs.at);
        for (int area = 0; area < AREAS; area++) free(m->fields[area].at);
        free(m->branches), free(m->fresh.at), free(m->tags.at), free(m);
    }
    free(self->program.code), free(self->program.constants), free(self->program.macros);
    free_chunks(self->program.permanent);
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    Py_buffer code;
    PyObject *constants, *macros, *layout, *python = NULL;
    int globals, branches;
    if (keywords && PyDict_Size(keywords)) return PyErr_Format(PyExc_TypeError, "no keyword arguments");
    if (!PyArg_ParseTuple(arguments, "y*O!O!iiO!|O!", &code, &PyList_Type, &constants, &PyList_Type, &macros, &globals,
                          &branches, &PyDict_Type, &layout, &PyTuple_Type, &python))
        return NULL;
    ProgramObject *self = (ProgramObject *)PyType_GenericAlloc(type, 0);
    Machine *m = calloc(1, sizeof *m);
    if (self && m && code.len > 0 && code.len % 4 == 0 && globals >= 0 && branches >= 0 &&
        (!python || PyTuple_Size(python) == 3)) {
        self->machine = m;
        m->python = Py_XNewRef(python);
        Program *p = &self->program;
        p->code_size = code.len / 4;
        p->constant_count = (int)PyList_Size(constants);
        p->macro_count = (int)PyList_Size(macros);
        p->global_count = globals;
        p->branch_count = branches;
        p->code = malloc((size_t)code.len);
        p->constants = calloc((size_t)p->constant_count + 1, sizeof(Value));
        p->macros = calloc((size_t)p->macro_count + 1, sizeof(Macro));
        m->stack = malloc(MAX_STACK * sizeof(Value));
        m->globals = malloc(((size_t)globals + 1) * sizeof(Value));
        m->branches = calloc(2 * (size_t)branches + 2, 1);
        if (!p->code || !p->constants || !p->macros || !m->stack || !m->globals || !m->branches)
            PyErr_NoMemory();
        else if (load(self, &code, constants, macros, layout)) {
            PyBuffer_Release(&code);
            return (PyObject *)self;
        }
    } else {
        free(m);
        PyErr_SetString(PyExc_ValueError, NOT_VALID);
    }
    PyBuffer_Release(&code);
    Py_XDECREF((PyObject *)self);
    return NULL;
}

/* ---- rendering */

void tidy_spans(Machine *m) {
    uint8_t *looped = arena(m, (size_t)m->message_count + 1);
    memset(looped, 0, (size_t)m->message_count + 1);
    for (size_t i = 0; i < m->spans.n; i++) looped[m->spans.at[i].message] |= m->spans.at[i].looped;
    size_t n = 0;
    for (size_t i = 0; i < m->spans.n; i++) {
        const Span p = m->spans.at[i];
        if (p.end <= p.start || (!p.looped && looped[p.message] && m->roles[p.message] == ROLE_ASSISTANT)) continue;
        if (n && m->spans.at[n - 1].message == p.message && m->spans.at[n - 1].end == p.start)
            m->spans.at[n - 1].end = p.end;
        else
            m->spans.at[n++] = p;
    }
    m->spans.n = n;
}

void keep_span(Machine *m, Numbers *table, int32_t row, Span p) {
    const int32_t fields[SPAN_COLUMNS] = {[SPAN_ROW] = row,
                                          [SPAN_MESSAGE] = p.message,
                                          [SPAN_START] = (int32_t)(p.start - m->text_start),
                                          [SPAN_END] = (int32_t)(p.end - m->text_start)};
    for (int k = 0; k < SPAN_COLUMNS; k++) APPEND(m, *table, fields[k]);
}

void keep_runs(Machine *m, Numbers *table, int32_t row, size_t start) {
    for (size_t i = 0; i < m->runs.n && !m->lost; i++) {
        const Run own = m->runs.at[i];
        const size_t first = own.start - m->text_start;
        if (own.end - m->text_start <= start) continue;
        const int32_t fields[FIELD_RUN_COLUMNS] = {[FIELD_RUN_ROW] = row,
                                                   [FIELD_RUN_LABEL] = (int32_t)own.label,
                                                   [FIELD_RUN_START] = (int32_t)(first > start ? first : start),
                                                   [FIELD_RUN_END] = (int32_t)(own.end - m->text_start)};
        for (int k = 0; k < FIELD_RUN_COLUMNS; k++) APPEND(m, *table, fields[k]);
    }
}

void begin_render(Machine *m, size_t size) {
    m->loop_count = m->guards = m->call_count = m->capture_count = m->generation_count = m->open_messages = 0;
    m->lost = m->refused = m->building = m->covered = false;
    m->steps = STEPS_BASE + 10 * (int64_t)size;
    m->work = WORK_BASE + 1000 * (int64_t)size;
    m->spans.n = m->runs.n = 0;
    m->text_start = m->out.n;
}

static void begin_row(Machine *m, size_t size) {
    arena_reset(m, ARENA_BASE + 64 * size);
    m->origins.n = m->labels.n = m->fresh.n = 0;
    for (int area = 0; area < AREAS; area++) m->fields[area].n = 0;
    memset(m->labelled, 0, sizeof m->labelled);
    begin_render(m, size);
}

static void collect(Machine *m, Batch *b, Py_ssize_t row, const Conversation *c) {
    const bool known = !m->lost;
    const uint32_t n = c->messages.list->n;
    if (known)
        tidy_spans(m);
    else
        m->spans.n = 0;
    uint8_t *flags = arena(m, n + 1);
    message_flags(m, c, known, 0, n, flags);
    for (uint32_t i = 0; i < n; i++) {
        APPEND(m, b->roles, c->roles[i]);
        APPEND(m, b->flags, flags[i]);
        APPEND(m, b->weights, c->weights ? c->weights[i] : NAN);
    }
    b->weighted |= c->weights != NULL;
    for (size_t i = 0; i < m->spans.n; i++) keep_span(m, &b->spans, (int32_t)row, m->spans.at[i]);
    keep_runs(m, &b->fields, (int32_t)row, 0);
    b->row_flags[row] = c->notes | (known ? ROW_KNOWN : 0) | (c->variables ? ROW_OWN_VARIABLES : 0) |
                        (tools_are_shown(m, c) ? 0 : ROW_TOOLS_DROPPED) |
                        (documents_are_shown(m, c) ? 0 : ROW_DOCUMENTS_DROPPED);
    b->needles[row] = c->needle;
    b->counts[row] = (int32_t)n;
    b->fresh[row] = m->fresh.n > 0;
    for (size_t i = 0; i < m->fresh.n; i++) m->branches[m->fresh.at[i]] = 1;
}

static char *copied_text(Value words) {
    char *copy = malloc((size_t)words.size + 1);
    if (!copy) return NULL;
    memcpy(copy, words.s, words.size);
    copy[words.size] = 0;
    return copy;
}

static void render_row(ProgramObject *self, Batch *b, Py_ssize_t row) {
    Machine *m = self->machine;
    const size_t tags = m->tags.n, spans = b->spans.n, fields = b->fields.n, roles = b->roles.n, start = m->out.n;
    const size_t turns = b->turns.n, turn_spans = b->turn_spans.n, turn_tags = b->turn_tags.n,
                 turn_fields = b->turn_fields.n, turn_texts = b->turn_texts.n;
    volatile bool is_read = false;
    m->conversation = (int32_t)row;
    begin_row(m, b->sizes[row]);
    if (setjmp(m->on_give_up)) {
        m->out.n = start;
        m->tags.n = tags;
        b->spans.n = spans, b->fields.n = fields;
        b->turns.n = turns, b->turn_spans.n = turn_spans, b->turn_tags.n = turn_tags;
        b->turn_fields.n = turn_fields, b->turn_texts.n = turn_texts;
        b->roles.n = b->flags.n = b->weights.n = roles;
        b->counts[row] = 0;
        for (size_t i = 0; i < m->fresh.n; i++) m->branches[m->fresh.at[i]] = 0;
        b->status[row] = m->refused ? STATUS_REFUSED : is_read ? STATUS_GAVE_UP : STATUS_UNREAD;
        b->why[row] = m->why;
        b->row_flags[row] = m->refused ? ROW_KNOWN : 0;
        if (m->refused) b->reasons[row] = copied_text(m->refusal);
        return;
    }
    Conversation c;
    read_row(m, &self->layout, b->rows[row], b->sizes[row], &c);
    is_read = true;
    run(m, &self->program, c.messages, c.tools, c.variables);
    if (m->out.n - m->text_start > MAX_TEXT) give_up(m, "the text is too large");
    if (m->lost) m->tags.n = tags;
    collect(m, b, row, &c);
    if (b->with_turns) render_turns(self, b, row, &c, start);
    b->status[row] = STATUS_RENDERED;
}

static PyObject *bytes_of(const void *data, size_t n) {
    return PyBytes_FromStringAndSize(n ? data : NULL, (Py_ssize_t)n);
}

static PyObject *text_list(const Machine *m, const Batch *b) {
    PyObject *texts = PyList_New(b->n);
    for (Py_ssize_t i = 0; texts && i < b->n; i++) {
        const int64_t start = i ? b->ends[i - 1] : 0;
        PyObject *text = bytes_of(m->out.at + start, (size_t)(b->ends[i] - start));
        if (text)
            PyList_SetItem(texts, i, text);
        else
            Py_CLEAR(texts);
    }
    return texts;
}

static PyObject *reason_list(const Batch *b) { /* None, why the machine gave up, or the template's own message */
    PyObject *reasons = PyList_New(b->n);
    for (Py_ssize_t i = 0; reasons && i < b->n; i++) {
        const char *words = b->reasons[i] ? b->reasons[i] : b->why[i];
        PyObject *reason = words ? PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), NULL) : Py_NewRef(Py_None);
        if (reason)
            PyList_SetItem(reasons, i, reason);
        else
            Py_CLEAR(reasons);
    }
    return reasons;
}

static PyObject *turns_of(const Batch *b, PyObject *rendered) { /* the result of `render`, and the turns */
    if (!rendered) return NULL;
    PyObject *turns = Py_BuildValue("(NNNNN)", bytes_of(b->turns.at, b->turns.n * sizeof(int32_t)),
                                    bytes_of(b->turn_texts.at, b->turn_texts.n),
                                    bytes_of(b->turn_spans.at, b->turn_spans.n * sizeof(int32_t)),
                                    bytes_of(b->turn_tags.at, b->turn_tags.n * sizeof(int32_t)),
                                    bytes_of(b->turn_fields.at, b->turn_fields.n * sizeof(int32_t)));
    PyObject *result = turns ? PySequence_Concat(rendered, turns) : NULL;
    Py_DECREF(rendered);
    Py_XDECREF(turns);
    return result;
}

static PyObject *result_of(const Machine *m, const Batch *b) {
    const size_t n = (size_t)b->n;
    PyObject *texts = text_list(m, b), *reasons = reason_list(b);
    PyObject *result = NULL;
    if (texts && reasons)
        result = Py_BuildValue(
            "(NOONNNNNNNNNNNN)", bytes_of(m->out.at, m->out.n), texts, reasons, bytes_of(b->ends, n * sizeof(int64_t)),
            bytes_of(b->status, n), bytes_of(b->row_flags, n), bytes_of(b->fresh, n),
            bytes_of(b->needles, n * sizeof(int32_t)), bytes_of(b->counts, n * sizeof(int32_t)),
            bytes_of(b->spans.at, b->spans.n * sizeof(int32_t)), bytes_of(m->tags.at, m->tags.n * sizeof(int32_t)),
            bytes_of(b->roles.at, b->roles.n), bytes_of(b->flags.at, b->flags.n),
            bytes_of(b->weights.at, b->weighted ? b->weights.n * sizeof(float) : 0),
            bytes_of(b->fields.at, b->fields.n * sizeof(int32_t)));
    Py_XDECREF(texts);
    Py_XDECREF(reasons);
    return result;
}

static bool begin_batch(Batch *b, PyObject *rows) {
    b->n = PyList_Size(rows);
    const size_t n = (size_t)b->n + 1;
    b->rows = malloc(n * sizeof *b->rows);
    b->sizes = malloc(n * sizeof *b->sizes);
    b->ends = calloc(n, sizeof *b->ends);
    b->status = calloc(n, 1);
    b->row_flags = calloc(n, 1);
    b->fresh = calloc(n, 1);
    b->needles = malloc(n * sizeof *b->needles);
    b->counts = calloc(n, sizeof *b->counts);
    b->reasons = calloc(n, sizeof *b->reasons);
    b->why = calloc(n, sizeof *b->why);
    if (!b->rows || !b->sizes || !b->ends || !b->status || !b->row_flags || !b->fresh || !b->needles || !b->counts ||
        !b->reasons || !b->why) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < b->n; i++) {
        PyObject *row = PyList_GetItem(rows, i);
        if (!PyBytes_CheckExact(row)) {
            PyErr_SetString(PyExc_TypeError, "rows are bytes");
            return false;
        }
        b->rows[i] = PyBytes_AsString(row);
        b->sizes[i] = (size_t)PyBytes_Size(row);
        b->needles[i] = -1;
    }
    return true;
}

static void end_batch(Batch *b) {
    for (Py_ssize_t i = 0; b->reasons && i < b->n; i++) free(b->reasons[i]);
    free(b->rows), free(b->sizes), free(b->ends), free(b->status), free(b->row_flags), free(b->fresh), free(b->needles);
    free(b->counts), free(b->reasons), free(b->why), free(b->spans.at), free(b->roles.at), free(b->flags.at);
    free(b->weights.at), free(b->turns.at), free(b->turn_spans.at), free(b->turn_tags.at), free(b->turn_texts.at);
    free(b->turn_fields.at), free(b->fields.at), free(b->previous.at), free(b->root_spans.at);
}

static PyObject *render_batch(PyObject *object, PyObject *rows, bool with_turns) {
    ProgramObject *self = (ProgramObject *)object;
    if (!PyList_CheckExact(rows)) return PyErr_Format(PyExc_TypeError, "rows are a list");
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "a program renders one batch at a time");
    Batch b;
    memset(&b, 0, sizeof b);
    b.with_turns = with_turns;
    PyObject *result = NULL;
    PyObject *held = PyList_GetSlice(rows, 0, PyList_Size(rows)); /* a copy: other threads may change the list */
    if (held && begin_batch(&b, held)) {
        Machine *m = self->machine;
        m->out.n = m->tags.n = 0;
        self->busy = true;
        m->thread = PyEval_SaveThread();
        locale_t usual = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* strtod and snprintf follow the thread's locale */
        locale_t before = uselocale(usual);
        for (Py_ssize_t i = 0; i < b.n; i++) {
            render_row(self, &b, i);
            b.ends[i] = (int64_t)m->out.n;
        }
        uselocale(before);
        if (usual) freelocale(usual);
        PyEval_RestoreThread(m->thread);
        m->thread = NULL;
        Py_CLEAR(m->held);
        if (!m->interrupted) result = result_of(m, &b);
        if (with_turns) result = turns_of(&b, result);
        m->interrupted = false;
        self->busy = false; /* only now: allocating objects may run other threads, and the texts are the machine's */
    }
    end_batch(&b);
    Py_XDECREF(held);
    return result;
}

static PyObject *render(PyObject *object, PyObject *rows) { return render_batch(object, rows, false); }
static PyObject *render_with_turns(PyObject *object, PyObject *rows) { return render_batch(object, rows, true); }

static PyObject *branches(PyObject *object, PyObject *Py_UNUSED(nothing)) { /* directions taken, and in total */
    const ProgramObject *self = (ProgramObject *)object;
    int taken = 0;
    for (int i = 0; i < 2 * self->program.branch_count; i++) taken += self->machine->branches[i] == 1;
    return Py_BuildValue("(ii)", taken, 2 * self->program.branch_count);
}

static PyObject *forget(PyObject *object, PyObject *Py_UNUSED(nothing)) { /* mark all branches as not yet compared */
    ProgramObject *self = (ProgramObject *)object;
    memset(self->machine->branches, 0, 2 * (size_t)self->program.branch_count);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"forget", forget, METH_NOARGS, NULL},
    {"render", render, METH_O, NULL},
    {"render_turns", render_with_turns, METH_O, NULL},
    {"branches", branches, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {0, NULL},
};
PyType_Spec program_spec = {"penstock.native._native.Program", sizeof(ProgramObject), 0, Py_TPFLAGS_DEFAULT, slots};
