/* The module's exports; `penstock/native/__init__.py` documents their signatures. */
#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec program_spec, unigram_spec;
PyObject *count_tokens(PyObject *module, PyObject *arguments);
PyObject *find_markers(PyObject *module, PyObject *arguments);
PyObject *kinds(PyObject *module, PyObject *arguments);
PyObject *last_markers(PyObject *module, PyObject *arguments);
PyObject *split_lines(PyObject *module, PyObject *text);

#endif
