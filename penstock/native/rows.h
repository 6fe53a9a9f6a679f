/* Converts a row's JSON to the conversation that the template receives. */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

#include "constants.h"
#include "values.h"

/* The column mapping and the template's requirements, filled once by `penstock.prepare.template.compiler`. An empty name
 * means that there is no such column or key. Names are strings with hashes; lists are lists of such strings. */
typedef struct Layout {
    int64_t reading;
    Value messages, tools, system, variables, query, input, response, history; /* columns */
    Value media;                                                               /* columns that must be empty */
    Value role_key, content_key, weight_keys, inverse_weight_key;
    Value roles; /* name -> role passed to the template; "tool_calls" for a message that is the JSON of its calls */
    /* adaptations that the template requires (penstock.prepare.chat.adapt.Needs) */
    bool object_arguments, string_arguments, wrapped_calls, typed_calls, no_empty_calls, null_with_calls;
    bool adapts_calls, wrapped_tools, bare_tools;
    Value text_for_null, text_for_missing, no_part, no_parts, no_text; /* lists of roles, or "calls" */
    Value near; /* columns that look meant, though the mapping does not use them */
    Value reserved; /* names that a row's template variables may not have */
    Value used_keys; /* keys of messages -> "" if they have a check of their own, "named" if the template may use them */
    Value needles;                                                     /* texts to look for in messages */
    uint8_t needle_starts[256]; /* the distinct first bytes of needles */
    uint32_t needle_start_count;
    bool needle_pairs[1 << 16]; /* the first two bytes of needles, by `byte_pair` */
} Layout;

static inline uint16_t byte_pair(const char *p) { return (uint16_t)((uint8_t)p[0] << 8 | (uint8_t)p[1]); }

static inline Value key_of(const char *name, size_t n) { return keyed(of_string(name, n)); }
#define NAME(literal) key_of(literal, sizeof(literal) - 1)

typedef struct Conversation {
    const Layout *layout;
    Value messages, tools;
    const Dict *variables;
    uint8_t *roles;  /* one per message, ROLE_… */
    float *weights;  /* NULL if the row has none; NaN where a message has none */
    const List *spans; /* of each message's content; NULL if the row has none */
    int32_t needle;  /* the first needle found in its text, or -1 */
    uint8_t notes;   /* ROW_… */
} Conversation;

/* Reads a row; gives up on anything unusual, which the Python reader then handles. */
void read_row(Machine *m, const Layout *layout, const char *row, size_t n, Conversation *found);
/* A copy of text that belongs to a message, or to none (-1). */
Value owned(Machine *m, Value text, int32_t message);

/* fields.c: label the fields of assistants. */
void read_fields(Machine *m, const Conversation *c);

/* ---- shown.c */

/* What became of the messages from:to in the rendered text (MESSAGE_…). */
void message_flags(Machine *m, const Conversation *c, bool known, uint32_t from, uint32_t to, uint8_t *flags);
/* Whether the rendered text shows every tool. */
bool tools_are_shown(Machine *m, const Conversation *c);
/* Whether the rendered text shows every document. */
bool documents_are_shown(Machine *m, const Conversation *c);

#endif
