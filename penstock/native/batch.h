/* A compiled template as a Python object, and what rendering a batch of rows collects. */
#ifndef PENSTOCK_BATCH_H
#define PENSTOCK_BATCH_H

#include "rows.h"

typedef struct ProgramObject {
    PyObject_HEAD
    Program program;
    Layout layout;
    Machine *machine;
    Chunk *layout_chunks;
    bool busy;
} ProgramObject;

typedef VECTOR(int32_t) Numbers;

/* What rendering a batch collects. */
typedef struct Batch {
    const char **rows;
    size_t *sizes;
    Py_ssize_t n;
    int64_t *ends;
    uint8_t *status, *row_flags, *fresh;
    int32_t *needles, *counts;
    char **reasons; /* a refusal's words, owned; or NULL */
    const char **why;
    Numbers spans, fields;
    VECTOR(uint8_t) roles;
    VECTOR(uint8_t) flags;
    VECTOR(float) weights;
    bool weighted;
    /* of assistant turns, where they are asked for (`turns.c`) */
    bool with_turns;
    Numbers turns, turn_spans, turn_tags, turn_fields;
    VECTOR(char) turn_texts, previous;
    VECTOR(Span) root_spans;
} Batch;

/* Begins a render: resets everything but the values of the row. */
void begin_render(Machine *m, size_t size);
/* The text of assistants that is repeated outside of their turn is nobody's; neighbours of one message are joined. */
void tidy_spans(Machine *m);
/* Add a span of this render to a table; `row` is the number of the conversation or turn. */
void keep_span(Machine *m, Numbers *table, int32_t row, Span p);
/* Add the labels of this render's text from `start` on to a table. */
void keep_runs(Machine *m, Numbers *table, int32_t row, size_t start);
/* Render every assistant turn of a row as inference sees it, and compare it with the text of the whole row. */
void render_turns(ProgramObject *self, Batch *b, Py_ssize_t row, const Conversation *c, size_t start);

#endif
