/* The functions of the module; `Native` in __init__.py says what they take and give. */

#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *read_rows(PyObject *module, PyObject *arguments);
PyObject *fill(PyObject *module, PyObject *arguments);
PyObject *pairs(PyObject *module, PyObject *arguments);
PyObject *kinds(PyObject *module, PyObject *arguments);
PyObject *split(PyObject *module, PyObject *text);

#endif
