/* Loops over many texts: classifies their characters, splits lines and finds markers. */

#include "native.h"
#include "values.h"

bool all_bytes(PyObject *list) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (!PyBytes_CheckExact(PyList_GetItem(list, i))) return false;
    return true;
}

static bool continues(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* The non-ASCII character at p and its size in bytes; size 0 if it is not UTF-8. */
uint32_t utf8_character(const uint8_t *p, size_t left, size_t *size) {
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
            const uint32_t point = utf8_character((const uint8_t *)text + i, n - i, &size);
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

typedef struct Needle {
    const char *text;
    size_t n;
} Needle;

/* The needles in a tuple of bytes that are not empty; NULL on error. */
static Needle *needles_of(PyObject *texts, size_t *count) {
    const Py_ssize_t n = PyTuple_Size(texts);
    Needle *found = PyMem_Malloc(((size_t)n + 1) * sizeof *found);
    *count = 0;
    if (!found) PyErr_NoMemory();
    for (Py_ssize_t i = 0; found && i < n; i++) {
        PyObject *text = PyTuple_GetItem(texts, i);
        if (!PyBytes_CheckExact(text) || !PyBytes_Size(text)) {
            PyErr_SetString(PyExc_ValueError, "markers as bytes that are not empty");
            PyMem_Free(found);
            return NULL;
        }
        found[(*count)++] = (Needle){PyBytes_AsString(text), (size_t)PyBytes_Size(text)};
    }
    return found;
}

static bool is_at(const char *p, const char *end, Needle needle) {
    return (size_t)(end - p) >= needle.n && !memcmp(p, needle.text, needle.n);
}

static bool opens_with(const char *p, const char *end, const Needle *needles, size_t count) {
    while (p < end && (*p == ' ' || (*p >= '\t' && *p <= '\r'))) p++;
    for (size_t i = 0; i < count; i++)
        if (is_at(p, end, needles[i])) return true;
    return false;
}

/* One search per distinct first byte, since most markers start with the same one. */
static bool holds(const char *p, const char *end, const Needle *needles, size_t count) {
    for (size_t i = 0; i < count; i++) {
        bool searched = false;
        for (size_t k = 0; k < i; k++) searched |= needles[k].text[0] == needles[i].text[0];
        const char *at = searched ? NULL : p;
        while (at && (at = memchr(at, needles[i].text[0], (size_t)(end - at)))) {
            for (size_t k = i; k < count; k++)
                if (is_at(at, end, needles[k])) return true;
            at++;
        }
    }
    return false;
}

PyObject *find_markers(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *data, *opening, *inside, *answer = NULL;
    Py_buffer starts, ends;
    if (!PyArg_ParseTuple(arguments, "O!y*y*O!O!", &PyBytes_Type, &data, &starts, &ends, &PyTuple_Type, &opening,
                          &PyTuple_Type, &inside))
        return NULL;
    size_t opening_count = 0, inside_count = 0;
    Needle *openers = needles_of(opening, &opening_count);
    Needle *insiders = openers ? needles_of(inside, &inside_count) : NULL;
    const char *text = PyBytes_AsString(data);
    const int64_t size = PyBytes_Size(data), *from = starts.buf, *to = ends.buf;
    const Py_ssize_t n = starts.len / (Py_ssize_t)sizeof *from;
    if (!insiders) goto done;
    bool fits = starts.len == ends.len && starts.len % (Py_ssize_t)sizeof *from == 0;
    for (Py_ssize_t i = 0; fits && i < n; i++) fits = from[i] >= 0 && from[i] <= to[i] && to[i] <= size;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "runs as starts and ends within the data");
        goto done;
    }
    answer = PyBytes_FromStringAndSize(NULL, n);
    for (Py_ssize_t i = 0; answer && i < n; i++) {
        const char *p = text + from[i], *end = text + to[i];
        PyBytes_AsString(answer)[i] =
            opens_with(p, end, openers, opening_count) || holds(p, end, insiders, inside_count);
    }
done:
    PyMem_Free(openers);
    PyMem_Free(insiders);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    return answer;
}

/* The start of the last marker in [p, end), or NULL. Markers are found from left to right, the longest one first. */
static const char *last_marker(const char *p, const char *end, const Needle *markers, size_t count, const bool *first) {
    const char *last = NULL;
    while (p < end) {
        size_t longest = 0;
        for (size_t i = 0; first[(uint8_t)*p] && i < count; i++)
            if (markers[i].n > longest && is_at(p, end, markers[i])) longest = markers[i].n;
        if (longest) last = p;
        p += longest ? longest : 1;
    }
    return last;
}

PyObject *last_markers(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *data, *markers, *answer = NULL;
    Py_buffer starts, ends;
    Py_ssize_t window;
    if (!PyArg_ParseTuple(arguments, "O!y*y*nO!", &PyBytes_Type, &data, &starts, &ends, &window, &PyTuple_Type, &markers))
        return NULL;
    size_t count = 0;
    Needle *found = needles_of(markers, &count);
    const char *text = PyBytes_AsString(data);
    const int64_t size = PyBytes_Size(data), *from = starts.buf, *to = ends.buf;
    const Py_ssize_t n = starts.len / (Py_ssize_t)sizeof *from;
    bool fits = window >= 0 && starts.len == ends.len && starts.len % (Py_ssize_t)sizeof *from == 0;
    for (Py_ssize_t i = 0; found && fits && i < n; i++) fits = from[i] >= 0 && from[i] <= to[i] && to[i] <= size;
    if (!fits) {
        if (found) PyErr_SetString(PyExc_ValueError, "runs as starts and ends within the data");
        goto done;
    }
    bool first[256] = {false};
    for (size_t i = 0; i < count; i++) first[(uint8_t)found[i].text[0]] = true;
    answer = found ? PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof *from) : NULL;
    for (Py_ssize_t i = 0; answer && i < n; i++) {
        const char *p = text + from[i], *end = text + to[i], *at = NULL;
        if (to[i] - from[i] > window) at = last_marker(end - window, end, found, count, first);
        if (!at) at = last_marker(p, end, found, count, first);
        const int64_t place = at ? at - text : from[i];
        memcpy(PyBytes_AsString(answer) + i * (Py_ssize_t)sizeof place, &place, sizeof place);
    }
done:
    PyMem_Free(found);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    return answer;
}
