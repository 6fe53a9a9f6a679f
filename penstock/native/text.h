/* Texts in UTF-8, which somebody else owns. */

#ifndef PENSTOCK_TEXT_H
#define PENSTOCK_TEXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef unsigned char byte;

typedef struct {
    const byte *start;
    Py_ssize_t size;
} Span;

static inline Span span_of(PyObject *bytes) {
    return (Span){(const byte *)PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes)};
}

/* Whether all items of a list or tuple are bytes. */
static inline bool all_bytes(PyObject *items) {
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(items); k++)
        if (!PyBytes_CheckExact(PySequence_Fast_GET_ITEM(items, k))) return false;
    return true;
}

static inline bool equal(Span one, Span other) {
    return one.size == other.size && memcmp(one.start, other.start, (size_t)one.size) == 0;
}

static inline bool follows(byte value) { return (value & 0xC0) == 0x80; }

/* How many bytes the character takes that begins here; 0: this is not UTF-8. */
static inline int size_of_character(const byte *at, const byte *end) {
    const Py_ssize_t left = end - at;
    if (at[0] < 0x80) return 1;
    if (at[0] < 0xC2) return 0;
    if (at[0] < 0xE0) return left >= 2 && follows(at[1]) ? 2 : 0;
    if (at[0] < 0xF0) {
        if (left < 3 || !follows(at[1]) || !follows(at[2])) return 0;
        if ((at[0] == 0xE0 && at[1] < 0xA0) || (at[0] == 0xED && at[1] > 0x9F)) return 0;
        return 3;
    }
    if (at[0] > 0xF4 || left < 4 || !follows(at[1]) || !follows(at[2]) || !follows(at[3])) return 0;
    if ((at[0] == 0xF0 && at[1] < 0x90) || (at[0] == 0xF4 && at[1] > 0x8F)) return 0;
    return 4;
}

static inline byte *put_character(byte *out, uint32_t point) {
    if (point < 0x80) {
        *out++ = (byte)point;
    } else if (point < 0x800) {
        *out++ = (byte)(0xC0 | point >> 6);
        *out++ = (byte)(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
        *out++ = (byte)(0xE0 | point >> 12);
        *out++ = (byte)(0x80 | (point >> 6 & 0x3F));
        *out++ = (byte)(0x80 | (point & 0x3F));
    } else {
        *out++ = (byte)(0xF0 | point >> 18);
        *out++ = (byte)(0x80 | (point >> 12 & 0x3F));
        *out++ = (byte)(0x80 | (point >> 6 & 0x3F));
        *out++ = (byte)(0x80 | (point & 0x3F));
    }
    return out;
}

/* How many bytes the white space takes that begins here, as Python's `str.strip` has it; 0: it is none. */
static inline int size_of_space(const byte *at, const byte *end) {
    const Py_ssize_t left = end - at;
    if (left < 1) return 0;
    if (at[0] < 0x80) return at[0] == ' ' || (at[0] >= 0x09 && at[0] <= 0x0D) || (at[0] >= 0x1C && at[0] <= 0x1F);
    if (at[0] == 0xC2) return left >= 2 && (at[1] == 0x85 || at[1] == 0xA0) ? 2 : 0;
    if (left < 3) return 0;
    switch (at[0] << 8 | at[1]) {
    case 0xE19A:
    case 0xE380:
        return at[2] == 0x80 ? 3 : 0;
    case 0xE280:
        return at[2] <= 0x8A || at[2] == 0xA8 || at[2] == 0xA9 || at[2] == 0xAF ? 3 : 0;
    case 0xE281:
        return at[2] == 0x9F ? 3 : 0;
    default:
        return 0;
    }
}

static inline Span stripped(Span text) {
    const byte *at = text.start, *end = text.start + text.size;
    for (int size; (size = size_of_space(at, end)) > 0;) at += size;
    while (end > at) {
        const byte *last = end - 1;
        while (last > at && follows(*last)) last--;
        if (size_of_space(last, end) == 0) break;
        end = last;
    }
    return (Span){at, end - at};
}

#endif
