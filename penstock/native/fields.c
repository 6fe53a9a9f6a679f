/* Tracks which field of an assistant's message printed which bytes.
 *
 * A label belongs to addresses of text, as an origin does, and to lists, objects and other values that are no text. Code
 * that rewrites a value passes its label on. Labels never influence the text, nor which message owns it. */

#include "constants.h"
#include "rows.h"

enum { MAX_MARKS = 1 << 22 };

/* ---- look-ups */

/* The first label of text that ends after p. */
static size_t first_after(const Label *at, size_t low, size_t high, const char *p) {
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if ((uintptr_t)at[middle].end <= (uintptr_t)p)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

typedef struct Labels { /* entries in order of their addresses */
    const LabelVector *of;
    size_t first, last;
} Labels;

static Area area_of(const Machine *m, const char *p) {
    if (is_within(p, m->row_start, m->json_end)) return ROW_TEXT;
    return is_within(p, m->decoded_start, m->decoded) ? DECODED_TEXT : ARENA_TEXT;
}

/* The labels that the bytes [s, s+n) may have. */
static Labels labels_at(const Machine *m, const char *s) {
    const Area area = area_of(m, s);
    const LabelVector *own = &m->fields[area];
    size_t first = first_after(own->at, 0, own->n, s);
    if (area != ARENA_TEXT || !m->labels.n || (first < own->n && (uintptr_t)own->at[first].start <= (uintptr_t)s))
        return (Labels){own, first, own->n};
    const Chunk *chunk = m->first; /* constants are in none */
    while (chunk && !is_within(s, chunk->data, chunk->data + chunk->used))
        chunk = chunk == m->current ? NULL : chunk->next;
    if (!chunk) return (Labels){own, 0, 0};
    first = first_after(m->labels.at, chunk->first_label, chunk->last_label, s);
    return (Labels){&m->labels, first, chunk->last_label};
}

uint32_t label_of_text(const Machine *m, const char *s, size_t n) {
    const Labels found = labels_at(m, s);
    const char *end = s + n;
    if (found.first == found.last) return 0;
    const Label *at = found.of->at;
    const uint32_t label = at[found.first].label;
    for (size_t i = found.first; i < found.last && at[i].label == label && is_within(s, at[i].start, at[i].end); i++) {
        if ((uintptr_t)at[i].end >= (uintptr_t)end) return label;
        s = at[i].end;
    }
    return 0;
}

/* ---- copies */

void add_run(Machine *m, size_t start, size_t end, uint32_t label) {
    Run *before = m->runs.n ? &m->runs.at[m->runs.n - 1] : NULL;
    if (before && before->end == start && before->label == label)
        before->end = end;
    else
        APPEND(m, m->runs, (Run){start, end, label});
}

static void add_label(Machine *m, const char *start, const char *end, uint32_t label) {
    Label *before = m->labels.n > m->current->first_label ? &m->labels.at[m->labels.n - 1] : NULL;
    if (before && before->end == start && before->label == label) {
        before->end = end;
        return;
    }
    APPEND(m, m->labels, (Label){start, end, label});
    m->current->last_label = m->labels.n;
}

void copy_known_labels(Machine *m, const char *s, size_t n, const char *to) {
    Labels found = labels_at(m, s);
    for (const char *end = s + n; found.first < found.last; found.first++) {
        const Label own = found.of->at[found.first]; /* a copy: adding labels may move them */
        if ((uintptr_t)own.start >= (uintptr_t)end) break;
        const size_t from = (uintptr_t)own.start > (uintptr_t)s ? (size_t)(own.start - s) : 0;
        const size_t last = (uintptr_t)own.end < (uintptr_t)end ? (size_t)(own.end - s) : n;
        if (to)
            add_label(m, to + from, to + last, own.label);
        else
            add_run(m, m->out.n + from, m->out.n + last, own.label);
    }
}

Value with_label(Machine *m, Value made, uint32_t label) {
    if (label && made.size) add_label(m, made.s, made.s + made.size, label);
    return made;
}

void take_labels(Machine *m, size_t mark, const char *to) {
    size_t first = m->runs.n;
    while (first && m->runs.at[first - 1].end > mark) first--;
    const size_t kept = first + (first < m->runs.n && m->runs.at[first].start < mark); /* the first may begin before */
    for (size_t i = first; to && i < m->runs.n; i++) {
        const Run own = m->runs.at[i];
        add_label(m, to + (own.start > mark ? own.start - mark : 0), to + (own.end - mark), own.label);
    }
    if (kept > first) m->runs.at[first].end = mark;
    m->runs.n = kept;
}

/* ---- the fields of a row */

static void add_field(Machine *m, const char *start, const char *end, uint32_t label) {
    if (start >= end) return;
    const Area area = area_of(m, start);
    Label *before = m->fields[area].n ? &m->fields[area].at[m->fields[area].n - 1] : NULL;
    if (before && before->start <= start && before->end >= start && before->label == label)
        before->end = before->end > end ? before->end : end; /* also where a message has a value under several names */
    else
        APPEND(m, m->fields[area], (Label){start, end, label});
}

typedef struct Bounds { /* of the texts of a value, in the row and in its decoded text */
    const char *start, *end;
} Bounds;

static void widen(Machine *m, Bounds *bounds, Value text, uint32_t label) {
    const Area area = area_of(m, text.s);
    if (!text.size) return;
    if (area == ARENA_TEXT) { /* which has other text in between */
        add_field(m, text.s, text.s + text.size, label);
        return;
    }
    Bounds *own = &bounds[area];
    if (!own->start || text.s < own->start) own->start = text.s;
    if (!own->end || text.s + text.size > own->end) own->end = text.s + text.size;
}

static void label_inside(Machine *m, Value *v, Bounds *bounds, uint32_t label, int depth) {
    if (depth > 2 * MAX_DEPTH) give_up(m, "values nested too deeply");
    if (v->tag == STRING || v->tag == BIG) {
        widen(m, bounds, *v, label);
        return;
    }
    v->size = label;
    for (uint32_t i = 0; v->tag == LIST && i < v->list->n; i++)
        label_inside(m, &v->list->v[i], bounds, label, depth + 1);
    for (uint32_t i = 0; v->tag == DICT && i < v->dict->n; i++) {
        widen(m, bounds, v->dict->e[i].key, label);
        label_inside(m, &v->dict->e[i].value, bounds, label, depth + 1);
    }
}

/* Label a value of the row and everything in it. Nothing else lies between the texts of one value in the row. */
static void label_value(Machine *m, Value *v, uint32_t label) {
    Bounds bounds[2] = {{NULL, NULL}, {NULL, NULL}};
    label_inside(m, v, bounds, label, 0);
    for (int i = 0; i < 2; i++) add_field(m, bounds[i].start, bounds[i].end, label);
}

/* ---- content, which may contain thoughts and marked spans */

typedef struct Content {
    const char **marks; /* start and end of each marked span of one text, in order */
    uint32_t n, i;      /* number of marks, and the first that may lie ahead */
    uint32_t before;    /* marks in earlier texts of the message */
} Content;

static void label_piece(Machine *m, Content *c, const char *p, const char *end, uint32_t field) {
    while (p < end) {
        while (c->i < c->n && c->marks[2 * c->i + 1] <= p) c->i++;
        const bool inside = c->i < c->n && c->marks[2 * c->i] <= p;
        const char *next = c->i == c->n ? end : c->marks[2 * c->i + inside];
        if (next > end) next = end;
        add_field(m, p, next, field | (inside ? (c->before + c->i + 1) << MARK_SHIFT : 0));
        p = next;
    }
}

static const char *last_opening(Machine *m, const char *p, const char *end) {
    const char *found = NULL;
    for (const char *q; (q = find(m, p, (size_t)(end - p), "<think>", 7)); p = q + 7) found = q;
    return found;
}

/* A closing tag ends a thought that begins at the last opening tag after the closing tag before, or with the text. */
static void label_text(Machine *m, Content *c, Value text) {
    const char *p = text.s, *end = p + text.size;
    charge(m, text.size);
    const bool thinks = find(m, p, text.size, "think>", 6) != NULL;
    m->thinks |= thinks;
    for (const char *close; thinks && (close = find(m, p, (size_t)(end - p), "</think>", 8)); p = close + 8) {
        const char *open = last_opening(m, p, close);
        if (open) {
            label_piece(m, c, p, open, FIELD_CONTENT);
            label_piece(m, c, open, open + 7, FIELD_THINK_TAG);
            label_piece(m, c, open + 7, close, FIELD_THOUGHT);
        } else {
            label_piece(m, c, p, close, p == text.s ? FIELD_THOUGHT : FIELD_CONTENT);
        }
        label_piece(m, c, close, close + 8, open || p == text.s ? FIELD_THINK_TAG : FIELD_CONTENT);
    }
    label_piece(m, c, p, end, FIELD_CONTENT);
}

/* The marked spans of one text: a list of pairs of positions, sorted and disjoint; or none. */
static void read_marks(Machine *m, Content *c, Value text, const Value *spans) {
    c->before += c->n;
    c->n = c->i = 0;
    if (!spans || spans->tag == NONE) return;
    if (spans->tag != LIST || spans->list->n > MAX_MARKS - c->before) give_up(m, "spans of another type");
    c->n = spans->list->n;
    c->marks = arena(m, (2 * (size_t)c->n + 1) * sizeof *c->marks);
    size_t place = 0;
    int64_t points = 0;
    for (uint32_t i = 0; i < 2 * c->n; i++) {
        const Value pair = spans->list->v[i / 2];
        if (pair.tag != LIST || pair.list->n != 2) give_up(m, "spans of another type");
        const Value wanted = pair.list->v[i % 2];
        if (wanted.tag != INT || wanted.i < points) give_up(m, "spans of another type");
        place += point_offset(text.s + place, text.size - place, (size_t)(wanted.i - points));
        points = wanted.i;
        c->marks[i] = text.s + place;
    }
}

static void label_part(Machine *m, Content *c, Value *part, const Value *spans) {
    Value *text = part;
    if (part->tag == DICT) {
        const Value *type = find_key(part->dict, NAME("type"));
        if (type && (IS(*type, "thinking") || IS(*type, "reasoning"))) {
            m->thinks = true;
            for (uint32_t i = 0; i < part->dict->n; i++)
                if (!IS(part->dict->e[i].key, "type")) label_value(m, &part->dict->e[i].value, FIELD_REASONING);
            return;
        }
        text = find_key(part->dict, NAME("text"));
    }
    if (!text || text->tag != STRING) return;
    read_marks(m, c, *text, spans);
    label_text(m, c, *text);
}

static void label_content(Machine *m, Value *content, const Value *spans) {
    Content c = {.n = 0};
    if (content->tag != LIST) {
        if (content->tag == STRING) label_part(m, &c, content, spans);
        return;
    }
    const List *each = spans && spans->tag == LIST ? spans->list : NULL;
    for (uint32_t i = 0; i < content->list->n; i++)
        label_part(m, &c, &content->list->v[i], each && i < each->n ? &each->v[i] : NULL);
}

/* ---- messages */

static void label_call(Machine *m, const Value *call) {
    if (call->tag != DICT) return;
    const Value *inner = find_key(call->dict, NAME("function"));
    const Dict *function = inner && inner->tag == DICT ? inner->dict : call->dict;
    Value *arguments = NULL;
    for (uint32_t i = 0; i < function->n; i++) {
        const Value key = function->e[i].key;
        if (IS(key, "name")) label_value(m, &function->e[i].value, FIELD_CALL_NAME);
        if (IS(key, "arguments") || (IS(key, "parameters") && !arguments)) arguments = &function->e[i].value;
    }
    if (arguments) label_value(m, arguments, FIELD_CALL_ARGUMENTS);
}

static void label_message(Machine *m, const Dict *message, const Value *spans) {
    for (uint32_t i = 0; i < message->n; i++) {
        const Value key = message->e[i].key;
        Value *own = &message->e[i].value;
        if (IS(key, "content"))
            label_content(m, own, spans);
        else if (IS(key, "reasoning_content") || IS(key, "reasoning") || IS(key, "thinking"))
            label_value(m, own, FIELD_REASONING);
        else if (IS(key, "tool_responses"))
            label_value(m, own, FIELD_TOOL_RESPONSE);
        else if (IS(key, "function_call"))
            label_call(m, own);
        else if (IS(key, "tool_calls"))
            for (uint32_t k = 0; own->tag == LIST && k < own->list->n; k++) label_call(m, &own->list->v[k]);
    }
}

static int by_start(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)((const Label *)a)->start, y = (uintptr_t)((const Label *)b)->start;
    return (x > y) - (x < y);
}

/* Sort labels, and join those of a value that a message has under several names. */
static size_t tidied(Label *at, size_t n) {
    size_t sorted = 1, kept = 0;
    while (sorted < n && at[sorted].start >= at[sorted - 1].end) sorted++;
    if (sorted >= n) return n;
    qsort(at, n, sizeof *at, by_start);
    for (size_t i = 0; i < n; i++) {
        Label own = at[i];
        if (kept && own.start < at[kept - 1].end) own.start = at[kept - 1].end;
        if (own.start < own.end) at[kept++] = own;
    }
    return kept;
}

void read_fields(Machine *m, const Conversation *c) {
    m->thinks = false;
    for (uint32_t i = 0; i < c->messages.list->n; i++)
        if (c->roles[i] == ROLE_ASSISTANT)
            label_message(m, c->messages.list->v[i].dict, c->spans && i < c->spans->n ? &c->spans->v[i] : NULL);
    for (int area = 0; area < AREAS; area++) {
        LabelVector *own = &m->fields[area];
        own->n = tidied(own->at, own->n);
        if (area != ARENA_TEXT && own->n) m->labelled[area] = (Label){own->at->start, own->at[own->n - 1].end, 0};
    }
}
