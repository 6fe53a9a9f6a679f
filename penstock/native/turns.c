/* Assistant turns as inference sees them.
 *
 * For each assistant message i of a row two more renders are made: the prompt, messages[:i] with the generation prompt,
 * and the turn, messages[:i+1]. The row's root is the last turn that the template accepts, with the messages after it
 * where they only add to it. Every other turn is stored as the length it shares with the root and the text after it. */

#include "batch.h"

typedef struct Mark { /* the state of the arena */
    Chunk *chunk;
    size_t used, last_origin, origins, last_label, labels;
} Mark;

static Mark mark(const Machine *m) {
    const Chunk *chunk = m->current;
    return (Mark){m->current, chunk->used, chunk->last_origin, m->origins.n, chunk->last_label, m->labels.n};
}

static void release(Machine *m, Mark at) {
    m->current = at.chunk;
    m->current->used = at.used;
    m->current->last_origin = at.last_origin;
    m->origins.n = at.origins;
    m->current->last_label = at.last_label;
    m->labels.n = at.labels;
}

/* Render the first n messages to the end of the output; false where the template refuses them. */
static bool try_run(ProgramObject *self, const Conversation *c, uint32_t n, const Dict *variables, size_t size) {
    Machine *m = self->machine;
    List *const messages = c->messages.list;
    const uint32_t whole = messages->n;
    jmp_buf outer;
    memcpy(&outer, &m->on_give_up, sizeof outer);
    begin_render(m, size);
    messages->n = n;
    const bool jumped = setjmp(m->on_give_up) != 0;
    if (!jumped) run(m, &self->program, c->messages, c->tools, variables);
    messages->n = whole;
    memcpy(&m->on_give_up, &outer, sizeof outer);
    if (jumped && !m->refused) give_up(m, m->why);
    if (!jumped && m->out.n - m->text_start > MAX_TEXT) give_up(m, "the text is too large");
    if (jumped) m->out.n = m->text_start;
    m->refused = false;
    return !jumped;
}

/* The row's variables, asking for the generation prompt. */
static const Dict *prompting(Machine *m, const Dict *variables) {
    const uint32_t n = variables ? variables->n : 0;
    const Value copy = of_dict(m, n + 1);
    for (uint32_t i = 0; i < n; i++) set_key(m, copy.dict, variables->e[i].key, variables->e[i].value);
    set_key(m, copy.dict, keyed(LITERAL("add_generation_prompt")), of_bool(true));
    return copy.dict;
}

static void keep_text(Machine *m, Batch *b, size_t start, size_t n) {
    while (b->turn_texts.capacity - b->turn_texts.n < n)
        b->turn_texts.at = grown(m, b->turn_texts.at, &b->turn_texts.capacity, 1);
    if (n) memcpy(b->turn_texts.at + b->turn_texts.n, m->out.at + start, n);
    b->turn_texts.n += n;
}

static void keep_spans(Machine *m, Batch *b, int32_t turn, size_t cut, size_t first_tag) {
    for (size_t i = 0; i < m->spans.n; i++) {
        const Span p = m->spans.at[i];
        if (p.start - m->text_start < cut) continue;
        keep_span(m, &b->turn_spans, turn, p);
    }
    keep_runs(m, &b->turn_fields, turn, cut);
    for (size_t i = first_tag; i < m->tags.n && !m->lost; i += TAG_COLUMNS) {
        const int32_t *tag = m->tags.at + i;
        if ((size_t)tag[TAG_END] <= cut) continue;
        const int32_t fields[TAG_COLUMNS] = {[TAG_ROW] = turn, [TAG_START] = tag[TAG_START], [TAG_END] = tag[TAG_END]};
        for (int k = 0; k < TAG_COLUMNS; k++) APPEND(m, b->turn_tags, fields[k]);
    }
}

static void remember(Machine *m, Batch *b, size_t start, size_t n) { /* the turn, for the prompt of the next one */
    while (b->previous.capacity < n) b->previous.at = grown(m, b->previous.at, &b->previous.capacity, 1);
    if (n) memcpy(b->previous.at, m->out.at + start, n);
    b->previous.n = n;
}

static size_t common_size(const char *a, const char *b, size_t n) {
    size_t i = 0;
    while (i + 256 <= n && !memcmp(a + i, b + i, 256)) i += 256;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

typedef struct Text { /* a place in the output */
    size_t start, size;
} Text;

static size_t common_of(const Machine *m, Text a, Text b) {
    return common_size(m->out.at + a.start, m->out.at + b.start, a.size < b.size ? a.size : b.size);
}

typedef struct Turn {
    int32_t state;
    Text prompt, turn;
    uint8_t flags;
} Turn;

/* Both renders of the turn of message i, after `whole`. Spans and tags are then those of the turn. */
static Turn render_both(ProgramObject *self, Batch *b, Py_ssize_t row, const Conversation *c, uint32_t i, Text whole,
                        bool has_previous) {
    Machine *m = self->machine;
    const size_t first_tag = m->tags.n;
    Turn found = {.flags = MESSAGE_CONTENT_PRINTED};
    const Mark at = mark(m);
    found.prompt.start = m->out.n;
    if (!i || !try_run(self, c, i, prompting(m, c->variables), b->sizes[row])) { /* nobody asks without a message */
        found.state = STATE_PROMPT_REFUSED;
        release(m, at);
        return found;
    }
    found.prompt.size = m->out.n - found.prompt.start;
    m->tags.n = first_tag;
    release(m, at);
    if (has_previous && b->previous.n <= found.prompt.size &&
        common_size(m->out.at + found.prompt.start, b->previous.at, b->previous.n) == b->previous.n)
        found.state |= STATE_EXTENDS;
    if (i + 1 == c->messages.list->n) {
        found.turn = whole;
    } else {
        found.turn.start = m->out.n;
        if (!try_run(self, c, i + 1, c->variables, b->sizes[row])) {
            found.state = STATE_TURN_REFUSED;
            release(m, at);
            return found;
        }
        found.turn.size = m->out.n - found.turn.start;
        if (m->lost)
            m->spans.n = 0;
        else
            tidy_spans(m), found.state |= STATE_KNOWN;
        uint8_t *flags = arena(m, c->messages.list->n + 1);
        message_flags(m, c, !m->lost, i, i + 1, flags);
        found.flags = flags[i];
    }
    if (common_of(m, found.turn, found.prompt) == found.prompt.size) found.state |= STATE_CONTINUES;
    release(m, at);
    return found;
}

static void keep_turn(Machine *m, Batch *b, Py_ssize_t row, uint32_t i, Turn turn, size_t common, size_t cut) {
    const size_t shared = turn.state & STATE_CONTINUES ? turn.prompt.size : common_of(m, turn.turn, turn.prompt);
    const int32_t fields[TURN_COLUMNS] = {[TURN_ROW] = (int32_t)row,
                                          [TURN_MESSAGE] = (int32_t)i,
                                          [TURN_STATE] = turn.state,
                                          [TURN_PROMPT_SIZE] = (int32_t)turn.prompt.size,
                                          [TURN_SIZE] = (int32_t)turn.turn.size,
                                          [TURN_FLAGS] = turn.flags,
                                          [TURN_COMMON] = (int32_t)common,
                                          [TURN_CUT] = (int32_t)cut,
                                          [TURN_SHARED] = (int32_t)shared};
    for (int k = 0; k < TURN_COLUMNS; k++) APPEND(m, b->turns, fields[k]);
    if (turn.state & (STATE_PROMPT_REFUSED | STATE_TURN_REFUSED)) return;
    if (!(turn.state & STATE_IN_ROOT)) keep_text(m, b, turn.turn.start + cut, turn.turn.size - cut);
    if (!(turn.state & STATE_CONTINUES)) keep_text(m, b, turn.prompt.start + shared, turn.prompt.size - shared);
}

static void copy_spans(Machine *m, Batch *b) { /* of the root; starts and ends count from its text */
    b->root_spans.n = 0;
    for (size_t i = 0; i < m->spans.n; i++) {
        const Span p = m->spans.at[i];
        APPEND(m, b->root_spans, (Span){p.start - m->text_start, p.end - m->text_start, p.message, false});
    }
}

/* The last span of this render that begins in what it has in common with the root, spans before it included. */
static size_t cut_at(const Machine *m, const Batch *b, size_t common) {
    size_t cut = 0;
    for (size_t i = 0; i < m->spans.n && i < b->root_spans.n; i++) {
        const Span p = m->spans.at[i], q = b->root_spans.at[i];
        if (p.start - m->text_start > common || p.start - m->text_start != q.start || p.message != q.message) break;
        cut = q.start;
        if (p.end - m->text_start != q.end) break;
    }
    return cut;
}

static void render_side(ProgramObject *self, Batch *b, Py_ssize_t row, const Conversation *c, uint32_t i, Text whole,
                        Text root, bool *has_previous) {
    Machine *m = self->machine;
    const size_t end = m->out.n, first_tag = m->tags.n;
    const int32_t number = (int32_t)(b->turns.n / TURN_COLUMNS);
    m->conversation = -2 - number; /* its `{% generation %}` blocks are not the row's */
    Turn turn = render_both(self, b, row, c, i, whole, *has_previous);
    *has_previous = !(turn.state & (STATE_PROMPT_REFUSED | STATE_TURN_REFUSED));
    size_t common = 0, cut = 0;
    if (*has_previous) {
        common = common_of(m, turn.turn, root);
        if (common == turn.turn.size)
            turn.state |= STATE_IN_ROOT;
        else
            cut = turn.state & STATE_KNOWN ? cut_at(m, b, common) : 0;
        if (!(turn.state & STATE_IN_ROOT)) keep_spans(m, b, number, cut, first_tag);
        remember(m, b, turn.turn.start, turn.turn.size);
    }
    keep_turn(m, b, row, i, turn, common, cut);
    m->tags.n = first_tag;
    m->out.n = end;
}

void render_turns(ProgramObject *self, Batch *b, Py_ssize_t row, const Conversation *c, size_t start) {
    Machine *m = self->machine;
    const Text whole = {start, m->out.n - start};
    const size_t first_tag = m->tags.n;
    Text root = whole;
    copy_spans(m, b);
    uint32_t last = c->messages.list->n; /* the message of the root; later ones are refused, or not an assistant's */
    while (last > 0) {
        if (c->roles[--last] != ROLE_ASSISTANT) continue;
        m->conversation = -2 - (int32_t)(b->turns.n / TURN_COLUMNS);
        Turn turn = render_both(self, b, row, c, last, whole, false);
        if (!(turn.state & (STATE_PROMPT_REFUSED | STATE_TURN_REFUSED))) {
            const bool is_whole = common_of(m, turn.turn, whole) == turn.turn.size;
            turn.state |= is_whole ? STATE_IN_ROOT | STATE_IS_ROOT : STATE_IS_ROOT;
            if (!is_whole) {
                root = turn.turn;
                copy_spans(m, b);
                keep_spans(m, b, (int32_t)(b->turns.n / TURN_COLUMNS), 0, first_tag);
            }
            keep_turn(m, b, row, last, turn, turn.turn.size, 0);
            m->tags.n = first_tag;
            m->out.n = root.start + root.size > m->out.n ? m->out.n : root.start + root.size;
            break;
        }
        keep_turn(m, b, row, last, turn, 0, 0);
        m->tags.n = first_tag;
        m->out.n = whole.start + whole.size;
    }
    bool has_previous = false;
    for (uint32_t i = 0; i < last; i++)
        if (c->roles[i] == ROLE_ASSISTANT) render_side(self, b, row, c, i, whole, root, &has_previous);
    m->out.n = whole.start + whole.size;
    m->conversation = (int32_t)row;
    if (m->fresh.n) b->fresh[row] = 1;
    for (size_t i = 0; i < m->fresh.n; i++) m->branches[m->fresh.at[i]] = 1;
}
