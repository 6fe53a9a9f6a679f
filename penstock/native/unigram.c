/* Encodes texts with a Unigram model: cuts them at added tokens, and the sections between them into words. */

#include "constants.h"
#include "native.h"
#include "unigram.h"
#include "values.h"

typedef struct UnigramObject {
    PyObject_HEAD
    Unigram unigram;
    bool busy;
} UnigramObject;

typedef struct Encoding { /* of one text */
    Unigram *u;
    const uint8_t *text;
    Tokens *out;
} Encoding;

/* The character at p: its flags, or 0 if Python failed to answer. */
static inline uint32_t flags_at(Unigram *u, const uint8_t *p, int *width) {
    if (*p < 0x80 && u->characters[*p]) {
        *width = 1;
        return u->characters[*p] & 0xFF;
    }
    return character_entry(u, decode((const char *)p, width)) & 0xFF;
}

static Outcome word(const Encoding *e, Lead lead, const uint8_t *start, const uint8_t *end, uint32_t flags) {
    return encode_word(e->u, lead, start, (size_t)(end - start), flags, (uint32_t)(start - e->text), e->out);
}

/* How the first word of a section begins, or each word if spaces are dropped. */
static Lead first_lead(const Encoding *e, const uint8_t *start) {
    const int rules = e->u->rules;
    if (rules & UNIGRAM_PREPENDS_ALWAYS) return LEAD_PREPENDED;
    return rules & UNIGRAM_PREPENDS && (!(rules & UNIGRAM_ONLY_FIRST) || start == e->text) ? LEAD_PREPENDED : LEAD_NONE;
}

/* A word begins at `start`; sets `end` where it does. */
static Outcome next_word(const Encoding *e, Lead lead, const uint8_t *start, const uint8_t *stop, const uint8_t **end) {
    uint32_t first = 0, last = 0, all = 0;
    int width;
    const uint8_t *at = start;
    for (; at < stop; at += width) {
        const uint32_t flags = flags_at(e->u, at, &width);
        if (!flags) return FAILED;
        if (flags & CHARACTER_SEPARATES) break;
        if (!all) first = flags;
        all |= last = flags;
    }
    *end = at;
    if (first & CHARACTER_JOINS_LEFT || last & CHARACTER_JOINS_RIGHT) return BESIDE_SPACE;
    if (all & CHARACTER_INTERACTS && last & CHARACTER_STRIPPED && at < stop) return BESIDE_SPACE;
    return word(e, lead, start, at, all);
}

/* Encode a section whose words don't begin with their spaces. */
static Outcome words_without_spaces(const Encoding *e, const uint8_t *at, const uint8_t *stop) {
    Outcome outcome = ENCODED;
    while (at < stop && outcome == ENCODED) {
        int width;
        const uint32_t flags = flags_at(e->u, at, &width);
        if (!flags) return FAILED;
        if (flags & CHARACTER_SEPARATES) at += width;
        else outcome = next_word(e, first_lead(e, at), at, stop, &at);
    }
    return outcome;
}

/* Encode a section whose words begin with their spaces; of several spaces, all but the last are words of their own, or
   nothing if runs of spaces collapse. */
static Outcome words_with_spaces(const Encoding *e, const uint8_t *at, const uint8_t *stop) {
    const bool crlf = e->u->rules & UNIGRAM_CRLF_IS_ONE, collapses = e->u->rules & UNIGRAM_COLLAPSES;
    Lead lead = first_lead(e, at);
    const uint8_t *space_end = at; /* of the last space, as far as the reference's offsets say */
    Outcome outcome = ENCODED;
    while (outcome == ENCODED) {
        int width = 0;
        const uint32_t flags = at < stop ? flags_at(e->u, at, &width) : CHARACTER_KNOWN;
        if (!flags) return FAILED;
        const bool separates = flags & CHARACTER_SEPARATES;
        if (lead == LEAD_SPACE && (at == stop || (separates && !collapses)))
            outcome = word(e, LEAD_SPACE, space_end, space_end, 0);
        if (at == stop || outcome != ENCODED) break;
        if (separates) {
            lead = LEAD_SPACE;
            at += width;
            space_end = at;
            if (crlf && at < stop && at[-1] == '\r' && *at == '\n') at++;
        } else {
            const uint32_t start = (uint32_t)(at - e->text);
            size_t first = e->out->n;
            outcome = next_word(e, lead, at, stop, &at);
            for (; lead == LEAD_SPACE && first < e->out->n && e->out->ends[first] == start; first++)
                e->out->ends[first] = (uint32_t)(space_end - e->text); /* before the \n of a \r\n */
            lead = LEAD_NONE;
        }
    }
    return outcome;
}

/* Where a section ends without the white space that the tokenizer strips; NULL if Python failed to answer. */
static const uint8_t *stripped(Unigram *u, const uint8_t *start, const uint8_t *end) {
    while (start < end) {
        const uint8_t *last = end - 1;
        while (last > start && (*last & 0xC0) == 0x80) last--;
        int width;
        const uint32_t flags = flags_at(u, last, &width);
        if (!flags) return NULL;
        if (!(flags & CHARACTER_STRIPPED)) break;
        end = last;
    }
    return end;
}

static Outcome section(const Encoding *e, const uint8_t *start, const uint8_t *end) {
    if (e->u->rules & UNIGRAM_STRIPS && !(end = stripped(e->u, start, end))) return FAILED;
    if (start == end) return ENCODED;
    if (e->u->rules & UNIGRAM_DROPS_SPACE) return words_without_spaces(e, start, end);
    return words_with_spaces(e, start, end);
}

/* The longest added token at p: its end, or NULL. */
static const uint8_t *added_at(const Unigram *u, const uint8_t *p, const uint8_t *end, int32_t *found) {
    const uint8_t *longest = NULL;
    uint32_t node = 0;
    while (p < end && (node = trie_child(&u->added, node, *p))) {
        p++;
        if (u->added.nodes[node].piece < 0) continue;
        *found = u->added.nodes[node].piece;
        longest = p;
    }
    return longest;
}

static Outcome encode_text(Unigram *u, const uint8_t *text, size_t size, Tokens *out) {
    const Encoding e = {u, text, out};
    const uint8_t *end = text + size, *start = text;
    for (const uint8_t *at = text; at < end;) {
        int32_t found = -1;
        const uint8_t *after = u->added_starts[*at] ? added_at(u, at, end, &found) : NULL;
        if (!after) {
            at++;
            continue;
        }
        if (u->added_ids[found] == UINT32_MAX) return SURROUNDINGS;
        const Outcome outcome = section(&e, start, at);
        if (outcome != ENCODED) return outcome;
        if (!add_token(out, u->added_ids[found], (uint32_t)(after - text))) {
            PyErr_NoMemory();
            return FAILED;
        }
        start = at = after;
    }
    return section(&e, start, end);
}

/* ---- the Python object */

static PyObject *bytes_of(const void *at, size_t n, size_t item) {
    return PyBytes_FromStringAndSize(n ? at : "", (Py_ssize_t)(n * item));
}

/* Encode all texts; their outcomes and the offsets of their tokens are written to arrays. */
static bool encode_all(Unigram *u, PyObject *texts, Tokens *out, int64_t *offsets, uint8_t *outcomes) {
    for (Py_ssize_t i = 0; i < PyList_Size(texts); i++) {
        PyObject *text = PyList_GetItem(texts, i);
        char *bytes = NULL;
        Py_ssize_t size = 0;
        if (PyBytes_AsStringAndSize(text, &bytes, &size) < 0) return false;
        if ((size_t)size > MAX_TEXT || !is_utf8(bytes, (size_t)size)) {
            PyErr_SetString(PyExc_ValueError, "texts in UTF-8 of at most 64 MB");
            return false;
        }
        const size_t before = out->n;
        Py_INCREF(text); /* Python code runs meanwhile */
        const Outcome outcome = encode_text(u, (const uint8_t *)bytes, (size_t)size, out);
        Py_DECREF(text);
        if (outcome == FAILED) return false;
        if (outcome != ENCODED) out->n = before;
        outcomes[i] = (uint8_t)outcome;
        offsets[i + 1] = (int64_t)out->n;
    }
    return true;
}

static PyObject *unigram_encode(PyObject *object, PyObject *given) {
    UnigramObject *self = (UnigramObject *)object;
    if (!PyList_Check(given)) return PyErr_Format(PyExc_TypeError, "a list of texts");
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "the encoder is in use");
    PyObject *texts = PyList_GetSlice(given, 0, PyList_Size(given));
    if (!texts) return NULL;
    const size_t n = (size_t)PyList_Size(texts);
    Tokens out = {0};
    int64_t *offsets = PyMem_Calloc(n + 1, sizeof *offsets);
    uint8_t *outcomes = PyMem_Calloc(n + 1, 1);
    PyObject *answer = NULL;
    self->busy = true;
    if (!offsets || !outcomes) {
        PyErr_NoMemory();
    } else if (encode_all(&self->unigram, texts, &out, offsets, outcomes)) {
        PyObject *ids = bytes_of(out.ids, out.n, sizeof *out.ids), *ends = bytes_of(out.ends, out.n, sizeof *out.ends);
        PyObject *starts = bytes_of(offsets, n + 1, sizeof *offsets), *statuses = bytes_of(outcomes, n, 1);
        if (ids && ends && starts && statuses) answer = PyTuple_Pack(4, ids, starts, ends, statuses);
        Py_XDECREF(ids);
        Py_XDECREF(ends);
        Py_XDECREF(starts);
        Py_XDECREF(statuses);
    }
    self->busy = false;
    PyMem_Free(out.ids);
    PyMem_Free(out.ends);
    PyMem_Free(offsets);
    PyMem_Free(outcomes);
    Py_DECREF(texts);
    return answer;
}

static PyObject *unigram_forget(PyObject *object, PyObject *Py_UNUSED(none)) {
    UnigramObject *self = (UnigramObject *)object;
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "the encoder is in use");
    forget_words(&self->unigram.words);
    Py_RETURN_NONE;
}

/* Build a trie from sorted, distinct byte strings. */
static bool trie_of(PyObject *texts, Trie *trie) {
    const size_t n = (size_t)PyList_Size(texts);
    const uint8_t **at = PyMem_Calloc(n + 1, sizeof *at);
    size_t *sizes = PyMem_Calloc(n + 1, sizeof *sizes);
    bool fits = at && sizes;
    if (!fits) PyErr_NoMemory();
    for (size_t k = 0; fits && k < n; k++) {
        char *bytes;
        Py_ssize_t size;
        fits = PyBytes_AsStringAndSize(PyList_GetItem(texts, (Py_ssize_t)k), &bytes, &size) == 0;
        if (!fits) break;
        at[k] = (const uint8_t *)bytes, sizes[k] = (size_t)size;
        const size_t shorter = k && sizes[k - 1] < sizes[k] ? sizes[k - 1] : sizes[k];
        const int order = k ? memcmp(at[k - 1], at[k], shorter) : -1;
        fits = is_utf8(bytes, (size_t)size) && size && (order < 0 || (order == 0 && sizes[k - 1] < sizes[k]));
        if (!fits) PyErr_SetString(PyExc_ValueError, "pieces in UTF-8, sorted and distinct");
    }
    if (fits && !build_trie(trie, at, sizes, n)) {
        PyErr_NoMemory();
        fits = false;
    }
    PyMem_Free(at);
    PyMem_Free(sizes);
    return fits;
}

/* A copy of a buffer with `n` elements. */
static void *copied(const Py_buffer *buffer, size_t n, size_t item) {
    if ((size_t)buffer->len != n * item) {
        PyErr_SetString(PyExc_ValueError, "arrays as long as the lists of pieces");
        return NULL;
    }
    void *copy = PyMem_Malloc(n * item + 1);
    if (!copy) return PyErr_NoMemory();
    if (n) memcpy(copy, buffer->buf, n * item);
    return copy;
}

static bool fill_unigram(Unigram *u, PyObject *pieces, PyObject *added, const Py_buffer *buffers) {
    if (!trie_of(pieces, &u->pieces) || !trie_of(added, &u->added)) return false;
    const size_t n = (size_t)PyList_Size(pieces), m = (size_t)PyList_Size(added);
    if (!(u->ids = copied(&buffers[0], n, sizeof *u->ids))) return false;
    if (!(u->scores = copied(&buffers[1], n, sizeof *u->scores))) return false;
    if (!(u->added_ids = copied(&buffers[2], m, sizeof *u->added_ids))) return false;
    int64_t *bytes = copied(&buffers[3], 256, sizeof *bytes);
    if (!bytes) return false;
    memcpy(u->byte_ids, bytes, sizeof u->byte_ids);
    PyMem_Free(bytes);
    for (int byte = 0; byte < 256; byte++) u->added_starts[byte] = trie_child(&u->added, 0, (uint8_t)byte) != 0;
    u->characters = PyMem_Calloc(0x110000, sizeof *u->characters);
    if (!u->characters) PyErr_NoMemory();
    return u->characters != NULL;
}

enum { BUFFERS = 4 };

static PyObject *new_unigram(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    PyObject *pieces, *added, *character, *word;
    Py_buffer b[BUFFERS];
    int rules;
    unsigned int unk;
    double unk_score;
    if (!PyArg_ParseTuple(arguments, "O!y*y*O!y*y*IdiOO", &PyList_Type, &pieces, &b[0], &b[1], &PyList_Type, &added,
                          &b[2], &b[3], &unk, &unk_score, &rules, &character, &word))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    UnigramObject *self = (UnigramObject *)make(type, 0);
    if (self) {
        Unigram *u = &self->unigram;
        u->unk = unk, u->unk_score = unk_score, u->rules = rules;
        u->character = Py_NewRef(character), u->word = Py_NewRef(word);
        if (!fill_unigram(u, pieces, added, b)) Py_CLEAR(self);
    }
    for (int k = 0; k < BUFFERS; k++) PyBuffer_Release(&b[k]);
    return (PyObject *)self;
}

static int visit_unigram(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((UnigramObject *)object)->unigram.character);
    Py_VISIT(((UnigramObject *)object)->unigram.word);
    return 0;
}

static int clear_unigram(PyObject *object) {
    Py_CLEAR(((UnigramObject *)object)->unigram.character);
    Py_CLEAR(((UnigramObject *)object)->unigram.word);
    return 0;
}

static void free_unigram(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_unigram(object);
    Unigram *u = &((UnigramObject *)object)->unigram;
    void *owned[] = {u->pieces.nodes, u->added.nodes, u->ids,    u->scores, u->added_ids, u->characters, u->replaced,
                     u->spelled,      u->bounds,      u->best, u->own.ids, u->own.ends};
    for (size_t k = 0; k < sizeof owned / sizeof *owned; k++) PyMem_Free(owned[k]);
    forget_words(&u->words);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef unigram_methods[] = {
    {"encode", unigram_encode, METH_O, NULL},
    {"forget", unigram_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot unigram_slots[] = {
    {Py_tp_new, (void *)new_unigram},          {Py_tp_dealloc, (void *)free_unigram},
    {Py_tp_traverse, (void *)visit_unigram},   {Py_tp_clear, (void *)clear_unigram},
    {Py_tp_methods, (void *)unigram_methods},  {0, NULL},
};

PyType_Spec unigram_spec = {
    .name = "penstock.native._native.Unigram",
    .basicsize = sizeof(UnigramObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = unigram_slots,
};
