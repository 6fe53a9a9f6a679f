/* Loops over many texts: classifies their characters and splits lines. */

#include "native.h"
#include "values.h"

static bool all_bytes(PyObject *list) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (!PyBytes_CheckExact(PyList_GetItem(list, i))) return false;
    return true;
}

static bool continues(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* The non-ASCII character at p and its size in bytes; size 0 if it is not UTF-8. */
static uint32_t character(const uint8_t *p, size_t left, size_t *size) {
    *size = 0;
    if (p[0] < 0xE0) {
        if (p[0] < 0xC2 || left < 2 || !continues(p[1])) return 0;
        *size = 2;
        return (uint32_t)(p[0] & 0x1F) << 6 | (p[1] & 0x3F);
    }
    if (p[0] < 0xF0) {
        if (left < 3 || !continues(p[1]) || !continues(p[2])) return 0;
        const uint32_t point = (uint32_t)(p[0] & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);
        *size = point >= 0x800 && (point < 0xD800 || point >= 0xE000) ? 3 : 0;
        return point;
    }
    if (p[0] > 0xF4 || left < 4 || !continues(p[1]) || !continues(p[2]) || !continues(p[3])) return 0;
    const uint32_t point = (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12 |
                           (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);
    *size = point >= 0x10000 && point < 0x110000 ? 4 : 0;
    return point;
}

/* The or-ed kinds of a text's non-ASCII characters; -1 if it is not UTF-8. */
static int kinds_of(const char *text, size_t n, const uint8_t *table) {
    int found = 0;
    for (size_t i = 0; i < n;) {
        i += ascii_prefix(text + i, n - i);
        while (i < n && !(text[i] & 0x80)) i++;
        for (size_t size; i < n && (text[i] & 0x80); i += size) {
            const uint32_t point = character((const uint8_t *)text + i, n - i, &size);
            if (!size) return -1;
            found |= table[point];
        }
    }
    return found;
}

PyObject *kinds(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *texts, *answer = NULL;
    Py_buffer table;
    if (!PyArg_ParseTuple(arguments, "O!y*", &PyList_Type, &texts, &table)) return NULL;
    if (table.len != 0x110000 || !all_bytes(texts)) {
        PyErr_SetString(PyExc_ValueError, "texts as bytes, and the kind of each code point");
        goto done;
    }
    answer = PyBytes_FromStringAndSize(NULL, PyList_Size(texts));
    for (Py_ssize_t i = 0; answer && i < PyList_Size(texts); i++) {
        PyObject *text = PyList_GetItem(texts, i);
        const int found = kinds_of(PyBytes_AsString(text), (size_t)PyBytes_Size(text), table.buf);
        PyBytes_AsString(answer)[i] = (char)found;
        if (found < 0) {
            PyErr_SetString(PyExc_ValueError, "a text is not UTF-8");
            Py_CLEAR(answer);
        }
    }
done:
    PyBuffer_Release(&table);
    return answer;
}

PyObject *split_lines(PyObject *Py_UNUSED(module), PyObject *text) { /* text.split(b"\n"), several times as fast */
    if (!PyBytes_CheckExact(text)) return PyErr_Format(PyExc_TypeError, "a text as bytes");
    const char *at = PyBytes_AsString(text), *end = at + PyBytes_Size(text);
    PyObject *lines = PyList_New(0);
    while (lines) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        PyObject *line = PyBytes_FromStringAndSize(at, (newline ? newline : end) - at);
        if (!line || PyList_Append(lines, line) < 0) Py_CLEAR(lines);
        Py_XDECREF(line);
        if (!newline) break;
        at = newline + 1;
    }
    return lines;
}
