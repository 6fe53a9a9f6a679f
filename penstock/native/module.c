#include "native.h"

static PyMethodDef methods[] = {
    {"read", read_rows, METH_VARARGS, NULL},
    {"fill", fill, METH_VARARGS, NULL},
    {"pairs", pairs, METH_VARARGS, NULL},
    {"kinds", kinds, METH_VARARGS, NULL},
    {"split", split, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
