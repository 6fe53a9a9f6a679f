/* Tracks which message printed which bytes.
 *
 * A string is a slice of the row's bytes, of its decoded text, or of the arena, so slicing keeps its origin by itself;
 * code that copies bytes records where they came from. The output has spans: sorted runs that belong to one message. */

#include "constants.h"
#include "values.h"

static bool is_assistant(const Machine *m, int32_t message) { return m->roles[message] == ROLE_ASSISTANT; }

/* The message whose bytes in the row contain an address, or -1. */
static int32_t source_of(const Machine *m, const char *p) {
    const bool raw = is_within(p, m->row_start, m->json_end);
    if (!m->sources.n || (!raw && !is_within(p, m->decoded_start, m->decoded))) return -1;
    size_t low = 0, high = m->sources.n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const Source *s = &m->sources.at[middle];
        if ((raw ? s->raw_end : s->decoded_end) <= p)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == m->sources.n) return -1;
    const Source *s = &m->sources.at[low];
    return p >= (raw ? s->raw : s->decoded) ? s->message : -1;
}

void add_origin(Machine *m, const char *start, size_t n, int32_t message, bool looped) {
    if (!n || message < 0) return;
    APPEND(m, m->origins, (Origin){start, (uint32_t)n, (uint32_t)message & 0x7fffffff, looped});
    m->current->last_origin = m->origins.n;
}

/* Record a span of output, unless the current iteration will claim it anyway. */
static void add_span(Machine *m, size_t start, size_t n, int32_t message, bool looped) {
    if (m->open_messages && !m->building) {
        const Iteration *inner = &m->loops[m->loop_count - 1];
        while (inner->message < 0) inner--;
        if (inner->captures == m->capture_count && (inner->message == message || is_assistant(m, message))) return;
    }
    APPEND(m, m->spans, (Span){start, start + n, message, looped});
}

static void copy_one(Machine *m, size_t offset, size_t n, int32_t message, bool looped, const char *to) {
    if (to)
        add_origin(m, to + offset, n, message, looped);
    else
        add_span(m, m->out.n + offset, n, message, looped);
}

void copy_origin(Machine *m, const char *s, size_t n, const char *to) {
    if (!n) return;
    const int32_t message = source_of(m, s);
    if (message < 0 || is_assistant(m, message)) copy_labels(m, s, n, to);
    if (message >= 0) {
        copy_one(m, 0, n, message, false, to);
        return;
    }
    if (!m->origins.n) return;
    const Chunk *chunk = m->first; /* constants are in none */
    while (chunk && !is_within(s, chunk->data, chunk->data + chunk->used))
        chunk = chunk == m->current ? NULL : chunk->next;
    if (!chunk) return;
    size_t low = chunk->first_origin, high = chunk->last_origin;
    const size_t last = high;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const Origin *o = &m->origins.at[middle];
        if (o->start + o->size <= s)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < last; low++) {
        const Origin o = m->origins.at[low]; /* a copy: adding origins may move them */
        if (o.start >= s + n) break;
        const char *from = o.start < s ? s : o.start;
        const char *end = o.start + o.size > s + n ? s + n : o.start + o.size;
        copy_one(m, (size_t)(from - s), (size_t)(end - from), (int32_t)o.message, o.looped, to);
    }
}

static void claim(Machine *m, size_t start, size_t end, int32_t message) {
    if (end <= start) return;
    if (m->scratch.n) {
        Span *before = &m->scratch.at[m->scratch.n - 1];
        if (before->message == message && before->end == start) {
            before->end = end;
            return;
        }
    }
    APPEND(m, m->scratch, (Span){start, end, message, true});
}

/* At the end of an iteration over a message: its output belongs to the message, except for text of other messages. */
void assign_spans(Machine *m, size_t start, size_t first, int32_t message) {
    if (m->out.n <= start) return;
    m->scratch.n = 0;
    size_t at = start;
    for (size_t i = first; i < m->spans.n; i++) {
        const Span p = m->spans.at[i];
        claim(m, at, p.start, message);
        claim(m, p.start, p.end, is_assistant(m, p.message) ? message : p.message);
        at = p.end;
    }
    claim(m, at, m->out.n, message);
    m->spans.n = first;
    for (size_t i = 0; i < m->scratch.n; i++) APPEND(m, m->spans, m->scratch.at[i]);
}

/* Outside of loops over messages, an expression that prints text of one message belongs entirely to it. */
void claim_statement(Machine *m, size_t start, size_t first) {
    if (m->spans.n <= first || m->open_messages || m->call_count || m->capture_count) return;
    const int32_t message = m->spans.at[first].message;
    bool looped = false;
    for (size_t i = first; i < m->spans.n; i++) {
        if (m->spans.at[i].message != message) return;
        looped |= m->spans.at[i].looped;
    }
    m->spans.at[first] = (Span){start, m->out.n, message, looped};
    m->spans.n = first + 1;
}

void rewind_output(Machine *m, size_t mark) {
    take_labels(m, mark, NULL);
    m->out.n = mark;
}

void drop_output(Machine *m, size_t mark) {
    charge(m, m->out.n - mark);
    rewind_output(m, mark);
    while (m->spans.n && m->spans.at[m->spans.n - 1].start >= mark) m->spans.n--;
}

Value take_output(Machine *m, size_t mark) {
    const size_t n = m->out.n - mark;
    if (n > MAX_TEXT) give_up(m, "a string is too large");
    charge(m, n);
    char *text = arena(m, n + 1);
    if (n) memcpy(text, m->out.at + mark, n);
    take_labels(m, mark, text);
    size_t first = m->spans.n;
    while (first && m->spans.at[first - 1].start >= mark) first--;
    for (size_t i = first; i < m->spans.n; i++) {
        const Span p = m->spans.at[i];
        add_origin(m, text + (p.start - mark), p.end - p.start, p.message, p.looped);
    }
    m->spans.n = first;
    m->out.n = mark;
    return of_string(text, n);
}
