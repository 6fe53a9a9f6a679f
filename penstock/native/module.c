#include "names.h"
#include "native.h"

static PyMethodDef methods[] = {
    {"compose", compose, METH_VARARGS, NULL},
    {"count_tokens", count_tokens, METH_VARARGS, NULL},
    {"find_markers", find_markers, METH_VARARGS, NULL},
    {"kinds", kinds, METH_VARARGS, NULL},
    {"last_markers", last_markers, METH_VARARGS, NULL},
    {"split_lines", split_lines, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_names(PyObject *module, const char *name, const char *const *names, int n) {
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple && i < n; i++) {
        PyObject *text = PyUnicode_FromString(names[i]);
        if (!text) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SetItem(tuple, i, text);
    }
    const int failed = !tuple || PyModule_AddObjectRef(module, name, tuple) < 0;
    Py_XDECREF(tuple);
    return failed ? -1 : 0;
}

static int fill(PyObject *module) {
#define NAME(x) #x,
#define OP_NAME(x, operands, pops, pushes) #x,
    static const char *const methods_[] = {METHODS(NAME)}, *const filters[] = {FILTERS(NAME)},
                                    *const tests[] = {TESTS(NAME)}, *const ops[] = {OPS(OP_NAME)};
    PyObject *type = PyType_FromSpec(&program_spec), *unigram = PyType_FromSpec(&unigram_spec);
    const int failed = !type || PyModule_AddObjectRef(module, "Program", type) < 0 || !unigram ||
                       PyModule_AddObjectRef(module, "Unigram", unigram) < 0 ||
                       add_names(module, "METHODS", methods_, METHOD_COUNT) < 0 ||
                       add_names(module, "FILTERS", filters, FILTER_COUNT) < 0 ||
                       add_names(module, "TESTS", tests, TEST_COUNT) < 0 || add_names(module, "OPS", ops, OP_COUNT) < 0 ||
                       PyModule_AddIntConstant(module, "COMPOSE_CACHE", COMPOSE_CACHE) < 0;
    Py_XDECREF(type);
    Py_XDECREF(unigram);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
