/* Properties of characters, as the running interpreter defines them.
 *
 * CPython's own tables are private and differ between versions (Unicode 14 in Python 3.11, 16 in 3.14). So they are read
 * through `str`: a page of 256 characters when one of them is first met, kept for the life of the process. One compiled
 * module then serves every version, and agrees with jinja2 on each. */

#include "values.h"

#include <stdatomic.h>

enum { PAGE = 256, PAGES = 0x110000 / PAGE };

typedef struct CasePage {
    CaseChange changes[3][PAGE]; /* by Case */
    bool cased[PAGE];
} CasePage;

typedef struct PrintPage {
    bool printable[PAGE];
} PrintPage;

static _Atomic(void *) case_pages[PAGES], print_pages[PAGES];

static bool fill_change(CaseChange *change, PyObject *character, const char *method) {
    PyObject *changed = PyObject_CallMethod(character, method, NULL);
    Py_ssize_t n = 0;
    const char *bytes = changed ? PyUnicode_AsUTF8AndSize(changed, &n) : NULL;
    const bool fits = bytes && (size_t)n <= sizeof change->bytes;
    if (fits) {
        memcpy(change->bytes, bytes, (size_t)n);
        change->size = (uint8_t)n;
    }
    Py_XDECREF(changed);
    return fits;
}

/* A character is cased if title case leaves the letter after it small. */
static bool fill_cased(bool *cased, PyObject *character) {
    PyObject *letter = PyUnicode_FromString("a"), *both = letter ? PyUnicode_Concat(character, letter) : NULL;
    PyObject *title = both ? PyObject_CallMethod(both, "title", NULL) : NULL;
    const Py_ssize_t found = title ? PyUnicode_Tailmatch(title, letter, 0, PY_SSIZE_T_MAX, 1) : -1;
    Py_XDECREF(letter), Py_XDECREF(both), Py_XDECREF(title);
    *cased = found > 0;
    return found >= 0;
}

static bool fill_cases(void *page, uint32_t i, PyObject *character) {
    CasePage *cases = page;
    return fill_cased(&cases->cased[i], character) && fill_change(&cases->changes[LOWER][i], character, "lower") &&
           fill_change(&cases->changes[UPPER][i], character, "upper") &&
           fill_change(&cases->changes[CAPITALIZE][i], character, "title");
}

static bool fill_printable(void *page, uint32_t i, PyObject *character) {
    PyObject *answer = PyObject_CallMethod(character, "isprintable", NULL);
    ((PrintPage *)page)->printable[i] = answer == Py_True;
    Py_XDECREF(answer);
    return answer != NULL;
}

typedef bool (*Fill)(void *page, uint32_t i, PyObject *character);

static void *new_page(uint32_t first, size_t size, Fill fill) {
    void *page = calloc(1, size);
    bool filled = page != NULL;
    for (uint32_t i = 0; filled && i < PAGE; i++) {
        PyObject *character = PyUnicode_FromOrdinal((int)(first + i));
        filled = character && fill(page, i, character);
        Py_XDECREF(character);
    }
    if (filled) return page;
    PyErr_Clear();
    free(page);
    return NULL;
}

static const void *page_of(Machine *m, _Atomic(void *) *pages, uint32_t c, size_t size, Fill fill) {
    _Atomic(void *) *place = &pages[c / PAGE];
    void *page = atomic_load_explicit(place, memory_order_acquire);
    if (page) return page;
    if (m->thread) PyEval_RestoreThread(m->thread); /* rendering runs without the GIL */
    page = new_page(c / PAGE * PAGE, size, fill);
    if (m->thread) m->thread = PyEval_SaveThread();
    if (!page) give_up(m, "characters of unknown properties");
    void *before = NULL;
    if (atomic_compare_exchange_strong(place, &before, page)) return page;
    free(page); /* another thread was faster */
    return before;
}

const CaseChange *case_change(Machine *m, uint32_t c, Case how) {
    const CasePage *page = page_of(m, case_pages, c, sizeof *page, fill_cases);
    return &page->changes[how][c % PAGE];
}

bool is_cased(Machine *m, uint32_t c) {
    if (c < 0x80) return (c | 32) >= 'a' && (c | 32) <= 'z';
    const CasePage *page = page_of(m, case_pages, c, sizeof *page, fill_cases);
    return page->cased[c % PAGE];
}

bool is_printable(Machine *m, uint32_t c) {
    if (c < 0x7f) return c >= 0x20;
    const PrintPage *page = page_of(m, print_pages, c, sizeof *page, fill_printable);
    return page->printable[c % PAGE];
}

/* The two sets below are the same in all versions; a test compares them with `str`. */

bool is_wide_space(uint32_t c) {
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_line_break(uint32_t c) {
    return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029;
}
