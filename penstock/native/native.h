/* The module's exports; `penstock/native/__init__.py` documents their signatures. */
#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

enum { COMPOSE_CACHE = 1 << 19 }; /* bytes */

extern PyType_Spec program_spec, unigram_spec;
PyObject *compose(PyObject *module, PyObject *arguments);
PyObject *count_tokens(PyObject *module, PyObject *arguments);
PyObject *find_markers(PyObject *module, PyObject *arguments);
PyObject *kinds(PyObject *module, PyObject *arguments);
PyObject *last_markers(PyObject *module, PyObject *arguments);
PyObject *split_lines(PyObject *module, PyObject *text);

bool all_bytes(PyObject *list);
uint32_t utf8_character(const uint8_t *p, size_t left, size_t *size); /* not ASCII; size 0: not UTF-8 */

#endif
