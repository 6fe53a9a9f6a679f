/* Composes texts for tokenizers that normalize them: runs of characters are replaced by their normal form.
 *
 * A run is a character and those after it that may compose with it or be reordered, or one that is not in normal form by
 * itself, and those after it; nothing composes across its ends. The normal form of a run comes from the tokenizer's own
 * normalizer, through Python, and is kept in a small cache: no table of Unicode is needed here. */

#include "constants.h"
#include "native.h"
#include "values.h"

enum { RUN = 30, TRIES = 4 };

typedef enum Answer { EMPTY, SAME, OTHER, UNCERTAIN } Answer;

typedef struct Slot {
    uint8_t answer, run_size, size, unused;
    char run[RUN], form[RUN];
} Slot;

enum { SLOTS = COMPOSE_CACHE / sizeof(Slot) };

typedef struct Output {
    char *bytes;
    size_t size, room;
} Output;

typedef struct Composer {
    const uint8_t *kinds;
    Slot *slots;
    PyObject *normalize;
    Output out;
} Composer;

/* One text: `copied` bytes of it are in the output, if `changed`. */
typedef struct Row {
    const char *text;
    size_t n, copied;
    const int64_t *ends; /* of its segments, in the text */
    int64_t *moved;      /* the same in the output */
    int64_t count, done; /* segments, and those whose end was moved */
    bool changed;
} Row;

static bool append(Output *out, const char *bytes, size_t n) {
    if (n > (size_t)PY_SSIZE_T_MAX - out->size) {
        PyErr_NoMemory();
        return false;
    }
    if (out->size + n > out->room) {
        const size_t room = (out->size + n) + (out->size + n) / 2 + 64;
        char *grown = PyMem_Realloc(out->bytes, room);
        if (!grown) {
            PyErr_NoMemory();
            return false;
        }
        out->bytes = grown;
        out->room = room;
    }
    if (n) memcpy(out->bytes + out->size, bytes, n);
    out->size += n;
    return true;
}

static Slot *slot_of(Slot *slots, const char *run, size_t n, bool *found) {
    uint64_t hash = n;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (uint8_t)run[i]) * 0x100000001B3u;
    hash ^= hash >> 29;
    Slot *free = NULL;
    for (size_t i = 0; i < TRIES; i++) {
        Slot *slot = &slots[(hash + i) % SLOTS];
        *found = slot->answer != EMPTY && slot->run_size == n && slot->size <= RUN && !memcmp(slot->run, run, n);
        if (*found) return slot;
        if (!free && slot->answer == EMPTY) free = slot;
    }
    return free ? free : &slots[hash % SLOTS];
}

/* Appends the form of a run to the output if it differs. EMPTY: an error is set. */
static Answer form_of(Composer *c, Row *row, size_t start, size_t end) {
    const char *run = row->text + start;
    const size_t n = end - start;
    bool found = false;
    Slot *slot = n <= RUN ? slot_of(c->slots, run, n, &found) : NULL;
    const char *form = NULL;
    Py_ssize_t size = 0;
    PyObject *answer = NULL;
    Answer what;
    if (found) {
        what = slot->answer;
        form = slot->form;
        size = slot->size;
    } else {
        answer = PyObject_CallFunction(c->normalize, "y#", run, (Py_ssize_t)n);
        if (!answer) return EMPTY;
        if (answer != Py_None && !PyBytes_CheckExact(answer)) {
            Py_DECREF(answer);
            PyErr_SetString(PyExc_TypeError, "a normal form as bytes, or None");
            return EMPTY;
        }
        what = UNCERTAIN;
        if (answer != Py_None) {
            form = PyBytes_AsString(answer);
            size = PyBytes_Size(answer);
            what = (size_t)size == n && !memcmp(form, run, n) ? SAME : OTHER;
        }
        if (slot && size <= RUN) { /* only now: the call may have run other threads */
            slot->answer = (uint8_t)what;
            slot->run_size = (uint8_t)n;
            slot->size = (uint8_t)size;
            memcpy(slot->run, run, n);
            if (size) memcpy(slot->form, form, (size_t)size);
        }
    }
    if (what == OTHER) {
        if (!append(&c->out, row->text + row->copied, start - row->copied) || !append(&c->out, form, (size_t)size))
            what = EMPTY;
        row->copied = end;
        row->changed = true;
    }
    Py_XDECREF(answer);
    return what;
}

/* Moves the ends of segments up to a place in the text; everything before the place is composed or copied as it is. */
static void move_ends(Row *row, size_t place, size_t written) {
    const int64_t shift = (int64_t)written - (int64_t)row->copied;
    for (; row->done < row->count && row->ends[row->done] <= (int64_t)place; row->done++)
        row->moved[row->done] = row->ends[row->done] + shift;
}

/* Composes a text. SAME: it needs none; OTHER: the result is the output; UNCERTAIN: it can't be composed here. */
static Answer compose_row(Composer *c, Row *row) {
    const char *text = row->text;
    const size_t n = row->n;
    c->out.size = 0;
    for (size_t i = 0, last = 0; i < n;) { /* `last`: where the character before i begins */
        const size_t ascii = ascii_prefix(text + i, n - i);
        if (ascii) {
            i += ascii;
            last = i - 1;
            continue;
        }
        if (!(text[i] & 0x80)) {
            last = i++;
            continue;
        }
        size_t size, count = 0, start = i ? last : 0;
        int kinds = 0;
        for (; i < n && (text[i] & 0x80); i += size, count++) {
            const int kind = c->kinds[utf8_character((const uint8_t *)text + i, n - i, &size)];
            if (!size) {
                PyErr_SetString(PyExc_ValueError, "a text is not UTF-8");
                return EMPTY;
            }
            if (kind & CODE_POINT_DECOMPOSES && !count)
                start = i;
            else if (!(kind & (CODE_POINT_COMPOSES | CODE_POINT_REORDERS)))
                break;
            last = i;
            kinds |= kind;
        }
        if (!count) { /* an ordinary character */
            last = i;
            i += size;
            continue;
        }
        if (count == 1 && kinds == CODE_POINT_REORDERS) continue; /* one mark that composes with nothing */
        move_ends(row, start, c->out.size);
        const Answer answer = form_of(c, row, start, i);
        if (answer == EMPTY || answer == UNCERTAIN) return answer;
        /* A segment that ends inside a run has no place in its form. */
        if (answer == OTHER && row->done < row->count && row->ends[row->done] < (int64_t)i) return UNCERTAIN;
    }
    if (!row->changed) return SAME;
    if (!append(&c->out, text + row->copied, n - row->copied)) return EMPTY;
    row->copied = n;
    move_ends(row, n, c->out.size);
    return OTHER;
}

typedef struct Segments {
    Py_buffer numbers, offsets, ends, moved;
} Segments;

static bool are_sound(const Segments *s, Py_ssize_t texts) {
    if (s->numbers.len % 8 || s->offsets.len != (texts + 1) * 8 || s->ends.len % 8 || s->moved.len != s->ends.len)
        return false;
    const int64_t *offsets = s->offsets.buf, *numbers = s->numbers.buf;
    bool sound = offsets[0] >= 0 && offsets[texts] <= s->ends.len / 8;
    for (Py_ssize_t i = 0; sound && i < texts; i++) sound = offsets[i] <= offsets[i + 1];
    for (Py_ssize_t i = 0; sound && i < s->numbers.len / 8; i++) sound = numbers[i] >= 0 && numbers[i] < texts;
    return sound;
}

/* What becomes of one text: itself, another one, or None. Its ends are moved only with it. */
static PyObject *composed(Composer *c, PyObject *text, const Segments *s, int64_t number) {
    const int64_t *offsets = s->offsets.buf, first = offsets[number], count = offsets[number + 1] - first;
    Row row = {.text = PyBytes_AsString(text), .n = (size_t)PyBytes_Size(text), .count = count};
    row.ends = (const int64_t *)s->ends.buf + first;
    row.moved = (int64_t *)s->moved.buf + first;
    const Answer answer = compose_row(c, &row);
    if (answer == OTHER) return PyBytes_FromStringAndSize(c->out.bytes, (Py_ssize_t)c->out.size);
    if (count) memcpy(row.moved, row.ends, (size_t)count * sizeof *row.ends);
    return answer == EMPTY ? NULL : Py_NewRef(answer == SAME ? text : Py_None);
}

PyObject *compose(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *texts, *answer = NULL;
    Composer c = {0};
    Segments s;
    Py_buffer kinds, cache;
    if (!PyArg_ParseTuple(arguments, "O!y*y*y*y*w*w*O", &PyList_Type, &texts, &s.numbers, &kinds, &s.offsets, &s.ends,
                          &s.moved, &cache, &c.normalize))
        return NULL;
    if (kinds.len != 0x110000 || cache.len != COMPOSE_CACHE || !all_bytes(texts) ||
        !are_sound(&s, PyList_Size(texts))) {
        PyErr_SetString(PyExc_ValueError, "texts as bytes, with segments, the kind of each code point and a cache");
        goto done;
    }
    c.kinds = kinds.buf;
    c.slots = cache.buf;
    const int64_t *numbers = s.numbers.buf;
    const Py_ssize_t count = s.numbers.len / 8;
    answer = PyList_New(count);
    for (Py_ssize_t i = 0; answer && i < count; i++) {
        PyObject *text = PyList_GetItem(texts, (Py_ssize_t)numbers[i]); /* `normalize` may have changed the list */
        if (text && !PyBytes_CheckExact(text)) PyErr_SetString(PyExc_TypeError, "texts as bytes");
        text = PyErr_Occurred() ? NULL : Py_NewRef(text);
        PyObject *own = text ? composed(&c, text, &s, numbers[i]) : NULL;
        Py_XDECREF(text);
        if (!own || PyList_SetItem(answer, i, own) < 0) Py_CLEAR(answer);
    }
done:
    PyMem_Free(c.out.bytes);
    PyBuffer_Release(&s.numbers);
    PyBuffer_Release(&s.offsets);
    PyBuffer_Release(&s.ends);
    PyBuffer_Release(&s.moved);
    PyBuffer_Release(&kinds);
    PyBuffer_Release(&cache);
    return answer;
}
