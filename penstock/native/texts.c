/* Texts put together from words and stencils, looked through for what needs care, and split into lines. */

#include "native.h"
#include "text.h"

/* The UTF-8 of a word, which lives as long as the word. */
static bool utf8_of(PyObject *word, Span *text) {
    if (PyBytes_CheckExact(word)) {
        *text = span_of(word);
        return true;
    }
    if (!PyUnicode_Check(word)) {
        PyErr_SetString(PyExc_TypeError, "words are str or bytes");
        return false;
    }
    text->start = (const byte *)PyUnicode_AsUTF8AndSize(word, &text->size);
    return text->start != NULL;
}

static byte *put(byte *out, PyObject *text) {
    memcpy(out, PyBytes_AS_STRING(text), (size_t)PyBytes_GET_SIZE(text));
    return out + PyBytes_GET_SIZE(text);
}

/* The text of the messages from first to last. */
static PyObject *text_of(PyObject *words, PyObject *before, PyObject *after, const int64_t *numbers, const byte *trims,
                         Py_ssize_t first, Py_ssize_t last, int64_t *sizes, Span *spans) {
    Py_ssize_t size = 0;
    for (Py_ssize_t k = first; k < last; k++) {
        const int64_t number = numbers[k];
        Span *span = &spans[k - first];
        if (!utf8_of(PyList_GET_ITEM(words, k), span)) return NULL;
        if (trims[number]) *span = stripped(*span);
        sizes[k] = span->size;
        size += PyBytes_GET_SIZE(PyList_GET_ITEM(before, number)) + span->size +
                PyBytes_GET_SIZE(PyList_GET_ITEM(after, number));
    }
    PyObject *text = PyBytes_FromStringAndSize(NULL, size);
    if (text == NULL) return NULL;
    byte *out = (byte *)PyBytes_AS_STRING(text);
    for (Py_ssize_t k = first; k < last; k++) {
        const Span span = spans[k - first];
        out = put(out, PyList_GET_ITEM(before, numbers[k]));
        memcpy(out, span.start, (size_t)span.size);
        out = put(out + span.size, PyList_GET_ITEM(after, numbers[k]));
    }
    return text;
}

/* Whether numbers and offsets stay within their bounds; the most messages of a row. */
static bool are_valid(const int64_t *numbers, Py_ssize_t count, Py_ssize_t stencils, const int64_t *offsets,
                      Py_ssize_t rows, Py_ssize_t *most) {
    if (rows < 0 || offsets[0] != 0 || offsets[rows] != count) return false;
    *most = 0;
    for (Py_ssize_t k = 0; k < rows; k++) {
        if (offsets[k] > offsets[k + 1]) return false;
        if (offsets[k + 1] - offsets[k] > *most) *most = (Py_ssize_t)(offsets[k + 1] - offsets[k]);
    }
    for (Py_ssize_t k = 0; k < count; k++)
        if (numbers[k] < 0 || numbers[k] >= stencils) return false;
    return true;
}

PyObject *fill(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *words, *before, *after, *answer = NULL, *texts = NULL, *sizes = NULL;
    Py_buffer numbers, offsets, trims;
    Span *spans = NULL;
    if (!PyArg_ParseTuple(arguments, "O!y*y*O!O!y*", &PyList_Type, &words, &numbers, &offsets, &PyList_Type, &before,
                          &PyList_Type, &after, &trims))
        return NULL;
    const Py_ssize_t count = numbers.len / 8, rows = offsets.len / 8 - 1, stencils = PyList_GET_SIZE(before);
    Py_ssize_t most = 0;
    if (count != PyList_GET_SIZE(words) || stencils != PyList_GET_SIZE(after) || stencils != trims.len ||
        !all_bytes(before) || !all_bytes(after) ||
        !are_valid(numbers.buf, count, stencils, offsets.buf, rows, &most)) {
        PyErr_SetString(PyExc_ValueError, "a stencil for each word, and rows that own all words");
        goto done;
    }
    texts = PyList_New(rows);
    sizes = PyBytes_FromStringAndSize(NULL, count * 8);
    spans = PyMem_Malloc((size_t)(most + 1) * sizeof(Span));
    if (texts == NULL || sizes == NULL || spans == NULL) goto done;
    const int64_t *bounds = offsets.buf;
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyObject *text = text_of(words, before, after, numbers.buf, trims.buf, bounds[row], bounds[row + 1],
                                 (int64_t *)PyBytes_AS_STRING(sizes), spans);
        if (text == NULL) goto done;
        PyList_SET_ITEM(texts, row, text);
    }
    answer = Py_BuildValue("OO", texts, sizes);
done:
    if (answer == NULL && !PyErr_Occurred()) PyErr_NoMemory();
    Py_XDECREF(texts);
    Py_XDECREF(sizes);
    PyMem_Free(spans);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&trims);
    return answer;
}

/* The bits of all pairs of bytes that a text has, of those wanted, which are sorted. */
static byte pairs_of(Span text, Span wanted, const byte *bits) {
    const byte *end = text.start + text.size;
    byte found = 0;
    for (Py_ssize_t k = 0; k < wanted.size; k += 2) {
        const byte first = wanted.start[k];
        if (k > 0 && first == wanted.start[k - 2]) continue; /* looked for with the one before */
        const byte *at = text.start;
        while ((at = memchr(at, first, (size_t)(end - at))) != NULL && ++at < end)
            for (Py_ssize_t n = k; n < wanted.size && wanted.start[n] == first; n += 2)
                if (*at == wanted.start[n + 1]) found |= bits[n / 2];
    }
    return found;
}

/* The kinds of all characters that a text has, together; -1: it is not UTF-8. */
static int kinds_of(Span text, const byte *table) {
    const byte *at = text.start, *end = text.start + text.size;
    int found = 0;
    while (at < end) {
        if (end - at >= 8) {
            uint64_t word;
            memcpy(&word, at, 8);
            if (!(word & 0x8080808080808080u)) {
                at += 8;
                continue;
            }
        }
        while (at < end && *at < 0x80) at++;
        while (at < end && *at >= 0x80) {
            const int size = size_of_character(at, end);
            if (size == 0) return -1;
            uint32_t point = at[0] & (0xFFu >> (size + 1));
            for (int k = 1; k < size; k++) point = point << 6 | (at[k] & 0x3Fu);
            found |= table[point];
            at += size;
        }
    }
    return found;
}

PyObject *pairs(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *texts;
    Span wanted, bits;
    if (!PyArg_ParseTuple(arguments, "O!y#y#", &PyList_Type, &texts, &wanted.start, &wanted.size, &bits.start,
                          &bits.size))
        return NULL;
    if (wanted.size != 2 * bits.size || !all_bytes(texts)) {
        PyErr_SetString(PyExc_ValueError, "texts as bytes, and a bit for each pair");
        return NULL;
    }
    PyObject *answer = PyBytes_FromStringAndSize(NULL, PyList_GET_SIZE(texts));
    if (answer == NULL) return NULL;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(texts); k++)
        PyBytes_AS_STRING(answer)[k] = (char)pairs_of(span_of(PyList_GET_ITEM(texts, k)), wanted, bits.start);
    return answer;
}

PyObject *kinds(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *texts, *answer = NULL;
    Py_buffer table;
    if (!PyArg_ParseTuple(arguments, "O!y*", &PyList_Type, &texts, &table)) return NULL;
    if (table.len != 0x110000 || !all_bytes(texts)) {
        PyErr_SetString(PyExc_ValueError, "texts as bytes, and the kind of each code point");
        goto done;
    }
    answer = PyBytes_FromStringAndSize(NULL, PyList_GET_SIZE(texts));
    for (Py_ssize_t k = 0; answer != NULL && k < PyList_GET_SIZE(texts); k++) {
        const int found = kinds_of(span_of(PyList_GET_ITEM(texts, k)), table.buf);
        PyBytes_AS_STRING(answer)[k] = (char)found;
        if (found < 0) {
            PyErr_SetString(PyExc_ValueError, "a text is not UTF-8");
            Py_CLEAR(answer);
        }
    }
done:
    PyBuffer_Release(&table);
    return answer;
}

PyObject *split(PyObject *Py_UNUSED(module), PyObject *text) {
    if (!PyBytes_CheckExact(text)) {
        PyErr_SetString(PyExc_TypeError, "a text as bytes");
        return NULL;
    }
    const Span all = span_of(text);
    const byte *at = all.start, *end = all.start + all.size;
    PyObject *lines = PyList_New(0);
    while (lines != NULL) {
        const byte *newline = memchr(at, '\n', (size_t)(end - at));
        const byte *stop = newline == NULL ? end : newline;
        PyObject *line = PyBytes_FromStringAndSize((const char *)at, stop - at);
        if (line == NULL || PyList_Append(lines, line) < 0) Py_CLEAR(lines);
        Py_XDECREF(line);
        if (newline == NULL) break;
        at = newline + 1;
    }
    return lines;
}
