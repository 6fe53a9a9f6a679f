/* Delegates operations to Python: those that templates rarely use, and those that depend on the interpreter's own tables.
 * `penstock.prepare.template.delegated` performs them with the reference's own functions, so they are exact; they cost a few
 * microseconds, a hundredth of leaving the row to the reference. An error makes the machine give up. */

#include "values.h"

enum { CALL_WORK = 8192, VALUE_WORK = 1024, BYTE_WORK = 32 }; /* charged for a call, a value and a byte of text */

/* Objects passed to the program: a callable (kind, name, arguments), an undefined value, and the type Markup. */
static PyObject *part(Machine *m, Py_ssize_t i) { return PyTuple_GetItem(m->python, i); }

static PyObject *to_python(Machine *m, Value v, int depth);

static PyObject *list_to_python(Machine *m, const List *list, int depth) {
    const bool plain = list->kind == PLAIN_LIST;
    if (list->kind > TUPLE) return NULL;
    PyObject *made = plain ? PyList_New(list->n) : PyTuple_New(list->n);
    for (uint32_t i = 0; made && i < list->n; i++) {
        PyObject *item = to_python(m, list->v[i], depth + 1);
        if (!item)
            Py_CLEAR(made);
        else if (plain)
            PyList_SetItem(made, i, item);
        else
            PyTuple_SetItem(made, i, item);
    }
    return made;
}

static PyObject *dict_to_python(Machine *m, const Dict *d, int depth) {
    PyObject *made = PyDict_New();
    for (uint32_t i = 0; made && i < d->n; i++) {
        PyObject *key = to_python(m, d->e[i].key, depth + 1), *value = to_python(m, d->e[i].value, depth + 1);
        if (!key || !value || PyDict_SetItem(made, key, value) < 0) Py_CLEAR(made);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return made;
}

static PyObject *text_to_python(Machine *m, Value v) {
    PyObject *text = PyUnicode_DecodeUTF8(v.s, (Py_ssize_t)v.size, NULL);
    if (!text || (v.tag == STRING && !v.markup)) return text;
    PyObject *made =
        v.tag == BIG ? PyNumber_Long(text) : PyObject_CallFunctionObjArgs(part(m, 2), text, (PyObject *)NULL);
    Py_DECREF(text);
    return made;
}

/* A new reference, or NULL: for loops, macros and generators, and for too much work, without an error set. */
static PyObject *to_python(Machine *m, Value v, int depth) {
    m->work -= VALUE_WORK + (v.tag == STRING ? BYTE_WORK * (int64_t)v.size : 0); /* shared values are copied */
    if (depth > MAX_DEPTH || m->work < 0) return NULL;
    switch (v.tag) {
    case UNDEFINED: return Py_NewRef(part(m, 1));
    case NONE: return Py_NewRef(Py_None);
    case BOOL: return PyBool_FromLong((long)v.i);
    case INT: return PyLong_FromLongLong(v.i);
    case FLOAT: return PyFloat_FromDouble(v.d);
    case BIG:
    case STRING: return text_to_python(m, v);
    case LIST: return list_to_python(m, v.list, depth);
    case DICT: return dict_to_python(m, v.dict, depth);
    default: return NULL;
    }
}

/* The text of `m->held` as a value of some tag; false if it is none, or too large. */
static bool held_text(Machine *m, Tag tag, Value *found) {
    Py_ssize_t n = 0;
    const char *s = PyUnicode_AsUTF8AndSize(m->held, &n);
    if (!s || (size_t)n > MAX_TEXT) return false;
    *found = of_string(s, (size_t)n);
    found->tag = (uint8_t)tag;
    return true;
}

/* The value of `m->held`; its text stays where it is. */
static bool of_held(Machine *m, Value *found) {
    PyObject *o = m->held;
    if (o == Py_None) {
        *found = none();
    } else if (PyBool_Check(o)) {
        *found = of_bool(o == Py_True);
    } else if (PyFloat_Check(o)) {
        *found = (Value){.tag = FLOAT, .d = PyFloat_AsDouble(o)};
    } else if (PyLong_Check(o)) {
        int overflow;
        *found = of_int(PyLong_AsLongLongAndOverflow(o, &overflow));
        if (overflow) {
            m->held = PyObject_Str(o);
            Py_DECREF(o);
            return m->held && held_text(m, BIG, found);
        }
    } else if (PyUnicode_Check(o)) {
        if (!held_text(m, STRING, found)) return false;
        found->markup = PyObject_IsInstance(o, part(m, 2)) == 1;
    } else {
        return false;
    }
    return true;
}

static const char *call(Machine *m, const char *kind, const char *name, const Value *a, int n, Value *found) {
    Py_CLEAR(m->held);
    PyObject *arguments = PyTuple_New(n);
    for (int i = 0; arguments && i < n; i++) {
        PyObject *own = to_python(m, a[i], 0);
        if (own)
            PyTuple_SetItem(arguments, i, own);
        else
            Py_CLEAR(arguments);
    }
    if (arguments) m->held = PyObject_CallFunction(part(m, 0), "ssO", kind, name, arguments);
    const char *why = !arguments && m->work < 0 ? "too much work"
                      : !arguments              ? "a loop, macro, range or generator beside text"
                      : !m->held                ? "an operation that raises an error"
                      : !of_held(m, found)      ? "a filter or method that gives neither text nor a number"
                                                : NULL;
    Py_XDECREF(arguments);
    if (PyErr_Occurred()) {
        m->interrupted = !PyErr_ExceptionMatches(PyExc_Exception);
        if (!m->interrupted) PyErr_Clear();
    }
    return why;
}

Value by_python(Machine *m, const char *kind, const char *name, const Value *a, int n) {
    charge(m, CALL_WORK);
    if (!m->python || m->interrupted) give_up(m, "an operation left to Python");
    const uint32_t label = label_of(m, a[0]);
    Value found = none();
    if (m->thread) PyEval_RestoreThread(m->thread); /* rendering runs without the GIL */
    const char *why = call(m, kind, name, a, n, &found);
    if (m->thread) m->thread = PyEval_SaveThread();
    if (why) give_up(m, why);
    if (found.tag != STRING && found.tag != BIG) return found;
    charge(m, BYTE_WORK * (size_t)found.size);
    if (found.tag == BIG && found.size > MAX_DIGITS) give_up(m, "an integer of more than 4000 digits");
    char *copy = arena(m, (size_t)found.size + 1);
    memcpy(copy, found.s, found.size);
    found.s = copy;
    return found.tag == STRING ? with_label(m, found, label) : found;
}
