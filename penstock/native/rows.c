/* Messages out of rows of JSON.

   Only rows of plain messages are known here; every other row, and every row that is not valid JSON or not UTF-8, is
   left to the decoder in chat/plain_rows.py. What is read here, that would have read equally.

   Rows are not trusted. Every byte is read through a cursor that knows where its row ends, and what is written never
   needs more room than what it was read from: no escape is shorter than its character. */

#include "native.h"
#include "text.h"

typedef struct {
    Span content; /* no start: null */
    Span calls;   /* no start: none; as JSON */
    byte role;    /* its number in the layout */
} Message;

typedef struct {
    Span messages, role, content, calls; /* keys */
    PyObject *ignored;                   /* keys of messages: texts that nobody reads */
    PyObject *columns;                   /* keys of rows, the same */
    PyObject *roles;                     /* names; those of answers come first */
    Py_ssize_t answers;
} Layout;

typedef struct {
    const byte *at, *end; /* what is left of the row */
    byte *room;           /* for texts without their escapes: as large as the row */
    Message *messages;
    Py_ssize_t count, capacity;
    const Layout *layout;
} Row;

/* ---- JSON */

static bool is_space(byte value) { return value == ' ' || value == '\n' || value == '\t' || value == '\r'; }

static void skip_space(Row *row) {
    while (row->at < row->end && is_space(*row->at)) row->at++;
}

/* Whether this comes next; if so, it is taken. */
static bool take(Row *row, char wanted) {
    skip_space(row);
    if (row->at == row->end || *row->at != (byte)wanted) return false;
    row->at++;
    return true;
}

static bool take_word(Row *row, const char *wanted) {
    const Py_ssize_t size = (Py_ssize_t)strlen(wanted);
    skip_space(row);
    if (row->end - row->at < size || memcmp(row->at, wanted, (size_t)size) != 0) return false;
    row->at += size;
    return true;
}

/* The next byte that is not an ordinary character of ASCII inside a string; the end, if there is none. */
static const byte *skip_ordinary(const byte *at, const byte *end) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    while (end - at >= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        const uint64_t quote = word ^ ones * '"', backslash = word ^ ones * '\\';
        /* The top bit of a byte is set if it is not ordinary; perhaps of bytes after it, too. */
        const uint64_t found = ((word - ones * 0x20) | (quote - ones) | (backslash - ones) | word) & tops;
        if (found) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            return at + (__builtin_ctzll(found) >> 3);
#else
            break;
#endif
        }
        at += 8;
    }
    while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\') at++;
    return at;
}

static int hexadecimal(byte digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    digit |= 0x20;
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* The four digits of an escape that begins here, or -1. */
static int32_t unit_of(const byte *at, const byte *end) {
    if (end - at < 6 || at[0] != '\\' || at[1] != 'u') return -1;
    int32_t unit = 0;
    for (int k = 2; k < 6; k++) {
        const int digit = hexadecimal(at[k]);
        if (digit < 0) return -1;
        unit = unit << 4 | digit;
    }
    return unit;
}

/* Takes an escape. False: it is none, or stands for a control character or half a surrogate. */
static bool take_escape(Row *row, byte **out) {
    static const char from[] = "\"\\/fnrt", to[] = "\"\\/\f\n\r\t";
    const int32_t unit = unit_of(row->at, row->end);
    if (unit < 0) {
        if (row->end - row->at < 2 || row->at[1] == 0) return false;
        const char *found = strchr(from, row->at[1]);
        if (found == NULL) return false;
        *(*out)++ = (byte)to[found - from];
        row->at += 2;
        return true;
    }
    uint32_t point = (uint32_t)unit;
    row->at += 6;
    if (unit >= 0xD800 && unit < 0xE000) {
        const int32_t low = unit_of(row->at, row->end);
        if (unit >= 0xDC00 || low < 0xDC00 || low >= 0xE000) return false;
        point = 0x10000 + ((uint32_t)(unit - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
        row->at += 6;
    }
    if (point < 0x20) return false;
    *out = put_character(*out, point);
    return true;
}

/* Takes a string. Its text lies in the row, or, if it has escapes, in the row's room. */
static bool take_string(Row *row, Span *text) {
    if (!take(row, '"')) return false;
    const byte *from = row->at; /* what was not copied yet */
    byte *out = row->room;
    for (;;) {
        row->at = skip_ordinary(row->at, row->end);
        if (row->at == row->end || *row->at < 0x20) return false;
        if (*row->at == '"') break;
        if (*row->at == '\\') {
            memcpy(out, from, (size_t)(row->at - from));
            out += row->at - from;
            if (!take_escape(row, &out)) return false;
            from = row->at;
        }
        while (row->at < row->end && *row->at >= 0x80) {
            const int size = size_of_character(row->at, row->end);
            if (size == 0) return false;
            row->at += size;
        }
    }
    const size_t rest = (size_t)(row->at++ - from);
    if (out == row->room) {
        *text = (Span){from, (Py_ssize_t)rest};
    } else {
        memcpy(out, from, rest);
        out += rest;
        *text = (Span){row->room, out - row->room};
        row->room = out;
    }
    return true;
}

/* Takes a number that any decoder takes: at most 15 digits, no exponent. */
static bool take_number(Row *row) {
    skip_space(row);
    const byte *at = row->at, *end = row->end;
    if (at < end && *at == '-') at++;
    const byte *digits = at;
    while (at < end && *at >= '0' && *at <= '9') at++;
    if (at == digits || (*digits == '0' && at - digits > 1)) return false;
    if (at < end && *at == '.') {
        const byte *point = at++;
        while (at < end && *at >= '0' && *at <= '9') at++;
        if (at - point < 2) return false;
    }
    if (at - digits > 16 || (at < end && (*at == 'e' || *at == 'E'))) return false;
    row->at = at;
    return true;
}

static bool take_scalar(Row *row) {
    Span text;
    byte *room = row->room;
    if (take_string(row, &text)) {
        row->room = room; /* nobody reads it */
        return true;
    }
    return take_word(row, "null") || take_word(row, "true") || take_word(row, "false") || take_number(row);
}

/* Takes a list up to its end, without a look at what is in it. False also where it has escapes of characters. */
static bool take_list(Row *row, Span *list) {
    Py_ssize_t depth = 0;
    bool quoted = false;
    skip_space(row);
    list->start = row->at;
    if (row->at == row->end || *row->at != '[') return false;
    for (; row->at < row->end; row->at++) {
        const byte value = *row->at;
        if (value == '\\') {
            row->at++;
            if (row->at == row->end || *row->at == 'u') return false;
        } else if (value == '"') {
            quoted = !quoted;
        } else if (!quoted && (value == '[' || value == '{')) {
            depth++;
        } else if (!quoted && (value == ']' || value == '}') && --depth == 0) {
            list->size = ++row->at - list->start;
            return true;
        }
    }
    return false;
}

/* ---- rows */

/* The number of a text among others, or -1. */
static Py_ssize_t number_among(Span text, PyObject *others) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(others); k++)
        if (equal(text, span_of(PyTuple_GET_ITEM(others, k)))) return k;
    return -1;
}

static bool take_message(Row *row, Message *message) {
    const Layout *layout = row->layout;
    bool has_role = false, has_content = false;
    *message = (Message){{NULL, 0}, {NULL, 0}, 0};
    if (!take(row, '{')) return false;
    do {
        Span key, value;
        if (!take_string(row, &key) || !take(row, ':')) return false;
        if (equal(key, layout->content)) {
            if (has_content) return false;
            has_content = true;
            if (!take_word(row, "null") && !take_string(row, &message->content)) return false;
        } else if (equal(key, layout->role)) {
            if (has_role || !take_string(row, &value)) return false;
            has_role = true;
            const Py_ssize_t role = number_among(value, layout->roles);
            if (role < 0) return false;
            message->role = (byte)role;
        } else if (layout->calls.size > 0 && equal(key, layout->calls)) {
            if (message->calls.start != NULL || !take_list(row, &message->calls)) return false;
        } else {
            if (number_among(key, layout->ignored) < 0) return false;
            if (!take_word(row, "null") && !take_string(row, &value)) return false;
        }
    } while (take(row, ','));
    return take(row, '}') && has_role && has_content;
}

static bool take_messages(Row *row) {
    bool answered = false;
    if (!take(row, '[')) return false;
    do {
        if (row->count == row->capacity) {
            const Py_ssize_t capacity = 2 * row->capacity + 16;
            Message *messages = PyMem_Realloc(row->messages, (size_t)capacity * sizeof(Message));
            if (messages == NULL) return false; /* the other decoder will say so, if it can't either */
            row->messages = messages;
            row->capacity = capacity;
        }
        Message *message = &row->messages[row->count++];
        if (!take_message(row, message)) return false;
        answered = answered || message->role < row->layout->answers;
    } while (take(row, ','));
    return take(row, ']') && answered;
}

static bool take_row(Row *row) {
    bool found = false;
    if (!take(row, '{')) return false;
    do {
        Span key;
        if (!take_string(row, &key) || !take(row, ':')) return false;
        if (equal(key, row->layout->messages)) {
            if (found || !take_messages(row)) return false;
            found = true;
        } else if (number_among(key, row->layout->columns) < 0 || !take_scalar(row)) {
            return false;
        }
    } while (take(row, ','));
    if (!take(row, '}') || !found) return false;
    skip_space(row);
    return row->at == row->end;
}

static bool append(PyObject *list, PyObject *item) {
    const bool done = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return done;
}

static PyObject *bytes_or_none(Span text) {
    if (text.start == NULL) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)text.start, text.size);
}

/* What `read` answers. */
typedef struct {
    PyObject *rows, *counts, *words, *odd;
    byte *roles;
    Py_ssize_t messages, capacity;
} Found;

static bool add(Found *found, Py_ssize_t number, const Row *row) {
    if (found->messages + row->count > found->capacity) {
        const Py_ssize_t capacity = 2 * found->capacity + row->count;
        byte *roles = PyMem_Realloc(found->roles, (size_t)capacity);
        if (roles == NULL) {
            PyErr_NoMemory();
            return false;
        }
        found->roles = roles;
        found->capacity = capacity;
    }
    for (Py_ssize_t k = 0; k < row->count; k++) {
        const Message message = row->messages[k];
        if (!append(found->words, bytes_or_none(message.content))) return false;
        const bool has_words = message.content.start != NULL && stripped(message.content).size > 0;
        if (!has_words || message.calls.start != NULL) {
            if (!append(found->odd, Py_BuildValue("nN", found->messages, bytes_or_none(message.calls)))) return false;
        }
        found->roles[found->messages++] = message.role;
    }
    return append(found->rows, PyLong_FromSsize_t(number)) && append(found->counts, PyLong_FromSsize_t(row->count));
}

static bool read_all(PyObject *rows, const char *left, const Layout *layout, Found *found) {
    Py_ssize_t largest = 0;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(rows); k++)
        largest = Py_MAX(largest, PyBytes_GET_SIZE(PyList_GET_ITEM(rows, k)));
    Row row = {.layout = layout};
    byte *room = PyMem_Malloc((size_t)largest);
    bool done = room != NULL;
    if (!done) PyErr_NoMemory();
    for (Py_ssize_t k = 0; done && k < PyList_GET_SIZE(rows); k++) {
        if (left[k]) continue;
        const Span own = span_of(PyList_GET_ITEM(rows, k));
        row.at = own.start;
        row.end = own.start + own.size;
        row.room = room;
        row.count = 0;
        if (take_row(&row)) done = add(found, k, &row);
    }
    PyMem_Free(row.messages);
    PyMem_Free(room);
    return done;
}

PyObject *read_rows(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *rows;
    const char *left;
    Py_ssize_t size;
    Layout layout;
    if (!PyArg_ParseTuple(arguments, "O!y#(y#y#y#y#O!O!O!n)", &PyList_Type, &rows, &left, &size,
                          &layout.messages.start, &layout.messages.size, &layout.role.start, &layout.role.size,
                          &layout.content.start, &layout.content.size, &layout.calls.start, &layout.calls.size,
                          &PyTuple_Type, &layout.ignored, &PyTuple_Type, &layout.columns, &PyTuple_Type, &layout.roles,
                          &layout.answers))
        return NULL;
    if (size != PyList_GET_SIZE(rows) || !all_bytes(rows) || !all_bytes(layout.ignored) ||
        !all_bytes(layout.columns) || !all_bytes(layout.roles) || PyTuple_GET_SIZE(layout.roles) > 255) {
        PyErr_SetString(PyExc_ValueError, "rows and names as bytes, a flag for each row, at most 255 roles");
        return NULL;
    }
    Found found = {PyList_New(0), PyList_New(0), PyList_New(0), PyList_New(0), NULL, 0, 0};
    PyObject *answer = NULL;
    if (found.rows != NULL && found.counts != NULL && found.words != NULL && found.odd != NULL &&
        read_all(rows, left, &layout, &found))
        answer = Py_BuildValue("OOy#OO", found.rows, found.counts, found.roles == NULL ? (byte *)"" : found.roles,
                               found.messages, found.words, found.odd);
    Py_XDECREF(found.rows);
    Py_XDECREF(found.counts);
    Py_XDECREF(found.words);
    Py_XDECREF(found.odd);
    PyMem_Free(found.roles);
    return answer;
}
