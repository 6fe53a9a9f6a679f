/* Whether what a row gives appears in its rendered text: the content, reasoning, calls, name and other keys of messages,
 * tools and documents. */

#include "rows.h"

static size_t occurrences(Machine *m, Value text, Value wanted) {
    size_t count = 0;
    charge(m, text.size);
    const char *p = text.s, *end = p + text.size;
    for (const char *q; (q = find(m, p, (size_t)(end - p), wanted.s, wanted.size)); p = q + wanted.size) count++;
    return count;
}

static Value name_of(Value call) { /* name of the called function, or empty */
    const Value *inner = find_key(call.dict, NAME("function"));
    const Value function = inner ? *inner : call;
    const Value *name = function.tag == DICT ? find_key(function.dict, NAME("name")) : NULL;
    return name && name->tag == STRING ? *name : LITERAL("");
}

static bool is_escaped(Value name) { /* whether JSON may escape it: control or non-ASCII characters */
    for (uint32_t i = 0; i < name.size; i++)
        if ((signed char)name.s[i] < 0x20 || name.s[i] == 0x7f || name.s[i] == '"' || name.s[i] == '\\') return true;
    return false;
}

static bool is_printed(Machine *m, Value name, size_t times, Value text) {
    if (occurrences(m, text, name) >= times) return true;
    if (!is_escaped(name)) return false;
    for (int ascii = 0; ascii < 2; ascii++) { /* as templates that print JSON escape it */
        const JsonStyle style = {.ascii = ascii};
        const size_t mark = m->out.n;
        put_json(m, name, &style, 0);
        const Value quoted = take_output(m, mark);
        if (occurrences(m, text, of_string(quoted.s + 1, quoted.size - 2)) >= times) return true;
    }
    return false;
}

static bool are_printed(Machine *m, Value calls, Value text) {
    if (calls.tag != LIST) return true;
    for (uint32_t i = 0; i < calls.list->n; i++)
        if (calls.list->v[i].tag == DICT && is_escaped(name_of(calls.list->v[i])))
            text = owned(m, text, -1); /* escaping names writes to the output, which may move it */
    for (uint32_t i = 0; i < calls.list->n; i++) {
        if (calls.list->v[i].tag != DICT) continue;
        const Value name = name_of(calls.list->v[i]);
        size_t times = 0;
        charge(m, 16 * (size_t)calls.list->n);
        for (uint32_t k = 0; k < calls.list->n; k++)
            times += calls.list->v[k].tag == DICT && !compare_text(name_of(calls.list->v[k]), name);
        if (name.size && !is_printed(m, name, times, text)) return false;
    }
    return true;
}

/* Text in the output, which moves when more is written to it, or a copy of the spans that a message printed. */
typedef struct Shown {
    size_t start, size;
    Value copy;
} Shown;

static Value text_of(const Machine *m, const Shown *shown) {
    return shown->copy.tag == STRING ? shown->copy : of_string(m->out.at + shown->start, shown->size);
}

static Shown whole_text(const Machine *m) {
    return (Shown){.start = m->text_start, .size = m->out.n - m->text_start, .copy = none()};
}

/* What a message printed in `count` spans, `first` being the first of them. */
static Shown printed_by(Machine *m, int32_t message, size_t first, size_t count) {
    if (count == 1) {
        const Span p = m->spans.at[first];
        return (Shown){.start = p.start, .size = p.end - p.start, .copy = none()};
    }
    size_t size = 0;
    charge(m, 8 * m->spans.n);
    for (size_t i = 0; i < m->spans.n; i++)
        if (m->spans.at[i].message == message) size += m->spans.at[i].end - m->spans.at[i].start;
    char *text = arena(m, size + 1), *p = text;
    for (size_t i = 0; i < m->spans.n && count; i++) {
        const Span span = m->spans.at[i];
        if (span.message != message) continue;
        memcpy(p, m->out.at + span.start, span.end - span.start);
        p += span.end - span.start;
    }
    return (Shown){.copy = of_string(text, size)};
}

static bool is_in(Machine *m, Value words, const Shown *shown) {
    const Value text = text_of(m, shown);
    const char *found = find(m, text.s, text.size, words.s, words.size);
    charge(m, found ? (size_t)(found - text.s) : text.size);
    return found != NULL;
}

/* Whether stripped words appear in a text, as they are or as JSON escapes them; most likely `near`, a part of it. */
static bool appears(Machine *m, Value words, const Shown *near, const Shown *text) {
    words = strip(m, words, NULL, true, true);
    if (!words.size || (near != text && is_in(m, words, near)) || is_in(m, words, text)) return true;
    if (!is_escaped(words)) return false;
    for (int ascii = 0; ascii < 2; ascii++) {
        const JsonStyle style = {.ascii = ascii};
        const size_t mark = m->out.n;
        put_json(m, words, &style, 0);
        const Value quoted = take_output(m, mark), spelled = of_string(quoted.s + 1, quoted.size - 2);
        if (is_in(m, spelled, text)) return true;
    }
    return false;
}

/* ---- messages */

typedef struct Message {
    const Dict *dict;
    const Shown *own;          /* what it printed; the whole text if regions are unknown */
    const Shown *near, *where; /* where its text should appear: an assistant's in what it printed, others' anywhere */
    bool is_answer;
    uint8_t flags;
} Message;

static void check_reasoning(Machine *m, Message *message, Value words) {
    words = strip(m, words, NULL, true, true);
    if (!words.size) return;
    if (!(message->flags & MESSAGE_HAS_REASONING)) message->flags |= MESSAGE_HAS_REASONING | MESSAGE_REASONING_PRINTED;
    if (!is_in(m, words, message->own)) message->flags &= (uint8_t)~MESSAGE_REASONING_PRINTED;
}

/* An assistant's text is reasoning before each </think>, and content otherwise. */
static void check_text(Machine *m, Message *message, Value text) {
    const char *start = text.s, *p = start, *end = text.s + text.size;
    const Value think = LITERAL("think>");
    charge(m, text.size);
    const bool thinks = message->is_answer && m->thinks;
    for (const char *q; thinks && (q = find(m, p, (size_t)(end - p), think.s, think.size)); p = q + think.size) {
        const bool opens = q > start && q[-1] == '<', closes = q > start + 1 && q[-1] == '/' && q[-2] == '<';
        if (!opens && !closes) continue;
        const Value chunk = of_string(start, (size_t)(q - (closes ? 2 : 1) - start));
        if (closes)
            check_reasoning(m, message, chunk);
        else if (!appears(m, chunk, message->near, message->where))
            message->flags &= (uint8_t)~MESSAGE_CONTENT_PRINTED;
        start = q + think.size;
    }
    if (!appears(m, of_string(start, (size_t)(end - start)), message->near, message->where))
        message->flags &= (uint8_t)~MESSAGE_CONTENT_PRINTED;
}

static void check_content(Machine *m, Message *message) {
    const Value *content = find_key(message->dict, NAME("content"));
    const Value *reasoning = message->is_answer ? find_key(message->dict, NAME("reasoning_content")) : NULL; /* aliased */
    if (reasoning && reasoning->tag == STRING) check_reasoning(m, message, *reasoning);
    if (!content) return;
    const bool is_list = content->tag == LIST;
    for (uint32_t i = 0; i < (is_list ? content->list->n : 1); i++) {
        const Value part = is_list ? content->list->v[i] : *content;
        const Value *text = part.tag == DICT ? find_key(part.dict, NAME("text")) : &part;
        if (text && text->tag == STRING) check_text(m, message, *text);
    }
}

static void check_calls(Machine *m, Message *message) {
    const Value *calls = find_key(message->dict, NAME("tool_calls"));
    if (!calls || !truth(m, *calls)) {
        calls = find_key(message->dict, NAME("function_call"));
        if (!calls || !truth(m, *calls)) return;
        const Value list = of_list(m, 1, PLAIN_LIST);
        list.list->v[0] = *calls;
        message->flags |= MESSAGE_HAS_CALLS | (are_printed(m, list, text_of(m, message->own)) ? MESSAGE_CALLS_PRINTED : 0);
        return;
    }
    message->flags |= MESSAGE_HAS_CALLS | (are_printed(m, *calls, text_of(m, message->own)) ? MESSAGE_CALLS_PRINTED : 0);
}

static void check_name(Machine *m, Message *message) {
    const Value *name = find_key(message->dict, NAME("name")), *content = find_key(message->dict, NAME("content"));
    if (!name || name->tag != STRING || !name->size) return;
    const size_t said = content && content->tag == STRING ? occurrences(m, *content, *name) : 0;
    if (occurrences(m, text_of(m, message->own), *name) <= said) message->flags |= MESSAGE_NAME_DROPPED;
}

/* The longest string in a value, the first of several; empty if there is none. */
static Value longest_text(Machine *m, Value v, Value longest, int depth) {
    if (depth > MAX_DEPTH) give_up(m, "values nested too deeply");
    if (v.tag == STRING) return v.size > longest.size ? v : longest;
    for (uint32_t i = 0; v.tag == LIST && i < v.list->n; i++) longest = longest_text(m, v.list->v[i], longest, depth + 1);
    for (uint32_t i = 0; v.tag == DICT && i < v.dict->n; i++)
        longest = longest_text(m, v.dict->e[i].value, longest, depth + 1);
    return longest;
}

static bool is_one_word(Value text) {
    return !memchr(text.s, ' ', text.size) && !memchr(text.s, '\t', text.size) && !memchr(text.s, '\n', text.size);
}

/* Keys without a check of their own. A single word under a name that the template knows is a switch, not text. */
static void check_other_keys(Machine *m, const Layout *l, Message *message, const Shown *whole) {
    for (uint32_t i = 0; i < message->dict->n; i++) {
        const Entry *e = &message->dict->e[i];
        const Value *use = find_key(l->used_keys.dict, e->key);
        if (use && !use->size) continue;
        const Value *reasoning = find_key(message->dict, NAME("reasoning_content")); /* aliased */
        if (IS(e->key, "reasoning_details") && reasoning && reasoning->tag != NONE) continue;
        const Value words = strip(m, longest_text(m, e->value, LITERAL(""), 0), NULL, true, true);
        if (use && is_one_word(words)) continue;
        if (!appears(m, words, message->near, whole)) message->flags |= MESSAGE_KEY_DROPPED;
    }
}

void message_flags(Machine *m, const Conversation *c, bool known, uint32_t from, uint32_t to, uint8_t *flags) {
    const uint32_t n = c->messages.list->n;
    size_t *first = arena(m, (n + 1) * sizeof(size_t)), *count = arena(m, (n + 1) * sizeof(size_t));
    memset(count, 0, (n + 1) * sizeof(size_t));
    for (size_t i = 0; i < m->spans.n; i++) {
        const int32_t message = m->spans.at[i].message;
        if (!count[message]++) first[message] = i;
    }
    const Shown whole = whole_text(m);
    for (uint32_t i = from; i < to; i++) {
        Message message = {.dict = c->messages.list->v[i].dict,
                           .is_answer = c->roles[i] == ROLE_ASSISTANT,
                           .flags = MESSAGE_CONTENT_PRINTED};
        const bool is_named = c->roles[i] != ROLE_TOOL && find_key(message.dict, NAME("name")); /* a tool: by its call */
        const bool has_calls = find_key(message.dict, NAME("tool_calls")) || find_key(message.dict, NAME("function_call"));
        Shown own = whole, near = whole;
        if (known && (count[i] || message.is_answer)) {
            if (count[i]) near = own = printed_by(m, (int32_t)i, first[i], 1);
            if (count[i] != 1 && (message.is_answer || is_named || has_calls))
                own = printed_by(m, (int32_t)i, first[i], count[i]);
        }
        message.own = &own;
        message.near = message.is_answer ? &own : &near;
        message.where = message.is_answer ? &own : &whole;
        check_content(m, &message);
        if (has_calls) check_calls(m, &message);
        if (is_named) check_name(m, &message);
        check_other_keys(m, c->layout, &message, &whole);
        flags[i] = message.flags;
    }
}

/* ---- tools and documents */

/* Whether the text has some words this often, as they are or as JSON escapes them. Spelling writes to the output, which
 * may move, so the text is copied before. */
static bool is_shown(Machine *m, Value words, size_t times, Value *text, bool *copied) {
    if (times == 1) {
        const char *found = find(m, text->s, text->size, words.s, words.size);
        charge(m, found ? (size_t)(found - text->s) : text->size);
        if (found) return true;
    }
    if (times == 1 && !is_escaped(words)) return false;
    if (!*copied && is_escaped(words)) {
        *text = owned(m, *text, -1);
        *copied = true;
    }
    return is_printed(m, words, times, *text);
}

static size_t times_called(const Conversation *c, Value name) {
    size_t times = 0;
    for (uint32_t i = 0; i < c->messages.list->n; i++) {
        const Value *calls = find_key(c->messages.list->v[i].dict, NAME("tool_calls"));
        for (uint32_t k = 0; calls && calls->tag == LIST && k < calls->list->n; k++)
            times += calls->list->v[k].tag == DICT && !compare_text(name_of(calls->list->v[k]), name);
    }
    return times;
}

/* A tool is shown by its name and the first line of its description; without one, by its name beside its calls. */
bool tools_are_shown(Machine *m, const Conversation *c) {
    if (c->tools.tag != LIST) return true;
    Value text = of_string(m->out.at + m->text_start, m->out.n - m->text_start);
    bool copied = false;
    for (uint32_t i = 0; i < c->tools.list->n; i++) {
        const Value name = name_of(c->tools.list->v[i]), *inner = find_key(c->tools.list->v[i].dict, NAME("function"));
        const Value function = inner ? *inner : c->tools.list->v[i];
        const Value *about = function.tag == DICT ? find_key(function.dict, NAME("description")) : NULL;
        Value line = about && about->tag == STRING ? strip(m, *about, NULL, true, true) : LITERAL("");
        const char *end = line.size ? memchr(line.s, '\n', line.size) : NULL;
        if (end) line = strip(m, of_string(line.s, (size_t)(end - line.s)), NULL, true, true);
        if (!name.size) continue;
        charge(m, 16 * (size_t)c->messages.list->n);
        if (!is_shown(m, name, line.size ? 1 : times_called(c, name) + 1, &text, &copied)) return false;
        if (line.size && !is_shown(m, line, 1, &text, &copied)) return false;
    }
    return true;
}

/* Documents are template variables of a row. */
bool documents_are_shown(Machine *m, const Conversation *c) {
    const Value *given = c->variables ? find_key(c->variables, NAME("documents")) : NULL;
    if (!given) return true;
    const Shown whole = whole_text(m);
    if (given->tag != LIST) return appears(m, longest_text(m, *given, LITERAL(""), 0), &whole, &whole);
    for (uint32_t i = 0; i < given->list->n; i++)
        if (!appears(m, longest_text(m, given->list->v[i], LITERAL(""), 0), &whole, &whole)) return false;
    return true;
}
