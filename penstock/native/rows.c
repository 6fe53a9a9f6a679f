#include "rows.h"

#include <math.h>
#include <strings.h>

/* ---- names */

static Value *get(const Dict *d, Value name) { return name.size ? find_key(d, name) : NULL; }

static bool is_among(Value names, Value name) {
    for (uint32_t i = 0; i < names.list->n; i++)
        if (!compare_text(names.list->v[i], name)) return true;
    return false;
}

static void remove_key(Dict *d, const Value *value) { /* `value` points into the dict */
    for (uint32_t i = 0; i < d->n; i++) {
        if (&d->e[i].value != value) continue;
        memmove(d->e + i, d->e + i + 1, (d->n - i - 1) * sizeof(Entry));
        d->n--;
        d->index = NULL;
        return;
    }
}

static _Noreturn void unusual(Machine *m) { give_up(m, "read in Python"); }

static uint8_t role_number(Value role) {
    return IS(role, "system")      ? ROLE_SYSTEM
           : IS(role, "user")      ? ROLE_USER
           : IS(role, "assistant") ? ROLE_ASSISTANT
           : IS(role, "tool")      ? ROLE_TOOL
                                   : ROLE_OTHER;
}

Value owned(Machine *m, Value text, int32_t message) {
    char *copy = arena(m, text.size + 1);
    memcpy(copy, text.s, text.size);
    add_origin(m, copy, text.size, message, false);
    return of_string(copy, text.size);
}

/* A name added to a message that its row lacks; like all of its text, it belongs to the message. */
static Value given_name(Machine *m, Value name, int32_t message) { return keyed(owned(m, name, message)); }
#define GIVEN(literal, message) given_name(m, LITERAL(literal), message)

/* ---- weights */

static double weight_of(Machine *m, Value v, bool inverse) {
    if (v.tag == NONE) return NAN;
    if (inverse) {
        if (!is_number(v) || (v.i != 0 && v.i != 1)) unusual(m);
        return v.i ? 0.0 : 1.0;
    }
    if (!is_number(v) && v.tag != FLOAT) unusual(m);
    const double weight = v.tag == FLOAT ? v.d : (double)v.i;
    if (!(weight >= 0)) unusual(m);
    return weight;
}

static float take_weight(Machine *m, const Layout *l, Dict *message) {
    double weight = NAN;
    for (uint32_t i = 0; i < l->weight_keys.list->n; i++) {
        const Value key = l->weight_keys.list->v[i];
        const Value *given = find_key(message, key);
        if (!given) continue;
        const double own = weight_of(m, *given, !compare_text(key, l->inverse_weight_key));
        remove_key(message, given);
        if (!isnan(weight) && !isnan(own) && own != weight) unusual(m);
        if (!isnan(own)) weight = own;
    }
    if (weight > 3.4e38) unusual(m); /* too large for a float: the reader rejects it */
    return (float)weight;
}

/* ---- one message */

static void check_calls(Machine *m, Value calls) {
    if (calls.tag != LIST) unusual(m);
    for (uint32_t i = 0; i < calls.list->n; i++) {
        const Value call = calls.list->v[i];
        if (call.tag != DICT) unusual(m);
        const Value *inner = find_key(call.dict, NAME("function"));
        const Value function = inner ? *inner : call;
        if (function.tag != DICT) unusual(m);
        const Value *name = find_key(function.dict, NAME("name")), *given = find_key(function.dict, NAME("arguments"));
        if (!name || name->tag != STRING) unusual(m);
        if (given && given->tag != NONE && given->tag != DICT && given->tag != STRING) unusual(m);
    }
}

static void check_parts(Machine *m, const Layout *l, const List *parts) {
    for (uint32_t i = 0; i < parts->n; i++) {
        if (parts->v[i].tag != DICT) unusual(m);
        const Value *type = find_key(parts->v[i].dict, NAME("type")), *text = find_key(parts->v[i].dict, NAME("text"));
        if (!type || !IS(*type, "text") || !text || text->tag != STRING) unusual(m);
        if (find_key(parts->v[i].dict, NAME("spans"))) unusual(m);
        for (uint32_t k = 0; k < l->weight_keys.list->n; k++)
            if (find_key(parts->v[i].dict, l->weight_keys.list->v[k])) unusual(m);
    }
}

static bool has_reasoning(Machine *m, const Dict *message) {
    const Value names[] = {NAME("reasoning_content"), NAME("reasoning"), NAME("thinking")};
    for (int i = 0; i < 3; i++) {
        const Value *given = find_key(message, names[i]);
        if (given && truth(m, *given)) return true;
    }
    return false;
}

/* Content and calls have types that templates accept. */
static void check_message(Machine *m, const Layout *l, const Dict *message, Value role) {
    const Value *calls = find_key(message, NAME("tool_calls")), *content = find_key(message, NAME("content"));
    const bool has_calls = calls && truth(m, *calls);
    if (has_calls) check_calls(m, *calls);
    if (content && content->tag == STRING) return;
    if (content && content->tag == LIST) {
        check_parts(m, l, content->list);
        return;
    }
    if (content && content->tag != NONE) unusual(m);
    if (IS(role, "assistant") && (has_calls || has_reasoning(m, message))) return;
    if (IS(role, "tool") && content) return;
    unusual(m);
}

static Value list_of(Machine *m, Value element) {
    const Value list = of_list(m, 1, PLAIN_LIST);
    list.list->v[0] = element;
    return list;
}

/* Calls and their elements may be JSON strings, and one call may be no list; the text of none becomes null. */
static void parse_calls(Machine *m, Dict *message, int32_t number) {
    Value *calls = find_key(message, NAME("tool_calls"));
    if (!calls) return;
    if (calls->tag == STRING) {
        *calls = strip(m, *calls, NULL, true, true).size ? json_text(m, *calls, number) : none();
        if (!truth(m, *calls)) *calls = none();
    }
    if (calls->tag == DICT && calls->dict->n) *calls = list_of(m, *calls);
    for (uint32_t i = 0; calls->tag == LIST && i < calls->list->n; i++)
        if (calls->list->v[i].tag == STRING) calls->list->v[i] = json_text(m, calls->list->v[i], number);
}

/* A message whose text is the JSON of its calls becomes one with `tool_calls`. */
static void set_calls(Machine *m, Dict *message, int32_t number) {
    Value *content = find_key(message, NAME("content"));
    if (!content || content->tag != STRING) unusual(m);
    Value calls = json_text(m, *content, number);
    remove_key(message, content);
    if (calls.tag == DICT) calls = list_of(m, calls);
    if (calls.tag != LIST || !calls.list->n) unusual(m);
    for (uint32_t i = 0; i < calls.list->n; i++) {
        const Value call = calls.list->v[i];
        if (call.tag != DICT || find_key(call.dict, NAME("function"))) continue;
        calls.list->v[i] = of_dict(m, 2);
        set_key(m, calls.list->v[i].dict, GIVEN("type", number), GIVEN("function", number));
        set_key(m, calls.list->v[i].dict, GIVEN("function", number), call);
    }
    set_key(m, message, GIVEN("content", number), LITERAL(""));
    set_key(m, message, GIVEN("tool_calls", number), calls);
}

static void rename_key(Machine *m, Dict *message, Value from, Value to, int32_t number) {
    if (!compare_text(from, to)) return;
    if (find_key(message, to)) unusual(m);
    for (uint32_t i = 0; i < message->n; i++)
        if (!compare_text(message->e[i].key, from)) message->e[i].key = given_name(m, to, number);
    message->index = NULL;
}

static void drop_nulls(Dict *message) { /* as apply_chat_template does */
    uint32_t kept = 0;
    for (uint32_t i = 0; i < message->n; i++)
        if (message->e[i].value.tag != NONE) message->e[kept++] = message->e[i];
    message->n = kept;
    message->index = NULL;
}

static Value read_message(Machine *m, const Layout *l, Value message, int32_t number, float *weight) {
    if (message.tag != DICT) unusual(m);
    Dict *d = message.dict;
    const Value *given = find_key(d, l->role_key);
    if (!given || given->tag != STRING) unusual(m);
    const Value *known = find_key(l->roles.dict, keyed(*given));
    if (!known) unusual(m);
    Value role = *known;
    for (uint32_t i = 0; i < d->n; i++)
        if (IS(d->e[i].key, "spans") || IS(d->e[i].key, "train_detail")) unusual(m);
    *weight = take_weight(m, l, d);
    rename_key(m, d, l->role_key, NAME("role"), number);
    rename_key(m, d, l->content_key, NAME("content"), number);
    if (IS(role, "tool_calls")) {
        role = NAME("assistant");
        set_calls(m, d, number);
    }
    *find_key(d, NAME("role")) = role;
    parse_calls(m, d, number);
    check_message(m, l, d, role);
    drop_nulls(d);
    return role;
}

/* ---- adaptations to the template (as in penstock.prepare.chat.adapt) */

static bool is_bare(Value tool) {
    return !find_key(tool.dict, NAME("function")) && find_key(tool.dict, NAME("name"));
}

static Value copied(Machine *m, const Dict *d) {
    const Value copy = of_dict(m, d->n + 2);
    if (d->n) memcpy(copy.dict->e, d->e, d->n * sizeof(Entry));
    copy.dict->n = d->n;
    return copy;
}

/* Wrap a bare function or call as in OpenAI's API, with its id outside. `number`: message index, or -1 for tools. */
static Value wrapped(Machine *m, Value bare, int32_t number) {
    const Value outside = of_dict(m, 3), inside = copied(m, bare.dict);
    const Value *id = find_key(bare.dict, NAME("id"));
    if (id) set_key(m, outside.dict, GIVEN("id", number), *id);
    if (id) remove_key(inside.dict, find_key(inside.dict, NAME("id")));
    const Value *type = find_key(inside.dict, NAME("type"));
    if (type) remove_key(inside.dict, type);
    set_key(m, outside.dict, GIVEN("type", number), GIVEN("function", number));
    set_key(m, outside.dict, GIVEN("function", number), inside);
    return outside;
}

static Value parsed_arguments(Machine *m, Value text, int32_t number) {
    if (!strip(m, text, NULL, true, true).size) return of_dict(m, 0);
    const Value found = json_text(m, text, number);
    if (found.tag != DICT) unusual(m); /* the reader decides whether the text may stay */
    return found;
}

static Value adapt_call(Machine *m, const Layout *l, Value call, int32_t number, uint8_t *notes) {
    const Value *inner = find_key(call.dict, NAME("function"));
    Value function = inner ? *inner : call;
    const Value *arguments = find_key(function.dict, NAME("arguments"));
    if (arguments && arguments->tag == STRING && l->object_arguments) {
        const Value object = parsed_arguments(m, *arguments, number);
        function = copied(m, function.dict);
        set_key(m, function.dict, NAME("arguments"), object);
        *notes |= ROW_ARGUMENTS_PARSED;
    } else if (arguments && arguments->tag == DICT && l->string_arguments) {
        const Value text = owned(m, dump_json(m, *arguments), number);
        function = copied(m, function.dict);
        set_key(m, function.dict, NAME("arguments"), text);
        *notes |= ROW_ARGUMENTS_DUMPED;
    }
    if (!inner) return l->wrapped_calls ? wrapped(m, function, number) : function;
    const Value adapted = copied(m, call.dict);
    if (l->typed_calls && !find_key(call.dict, NAME("type")))
        set_key(m, adapted.dict, GIVEN("type", number), GIVEN("function", number));
    set_key(m, adapted.dict, NAME("function"), function);
    return adapted;
}

static void adapt_calls(Machine *m, const Layout *l, Dict *message, int32_t number, uint8_t *notes) {
    Value *calls = find_key(message, NAME("tool_calls"));
    if (!calls || !l->adapts_calls) return;
    if (!truth(m, *calls)) {
        if (l->no_empty_calls) remove_key(message, calls);
        return;
    }
    const Value adapted = of_list(m, calls->list->n, PLAIN_LIST);
    for (uint32_t i = 0; i < adapted.list->n; i++)
        adapted.list->v[i] = adapt_call(m, l, calls->list->v[i], number, notes);
    *calls = adapted;
}

static Value joined_parts(Machine *m, const List *parts) {
    const size_t mark = m->out.n;
    for (uint32_t i = 0; i < parts->n; i++) {
        const Value text = *find_key(parts->v[i].dict, NAME("text"));
        put_traced(m, text.s, text.size);
    }
    return take_output(m, mark);
}

static void adapt_content(Machine *m, const Layout *l, Dict *message, Value role, int32_t number) {
    Value *given = find_key(message, NAME("content"));
    Value content = given ? *given : of_tag(MISSING);
    if (content.tag == LIST) {
        const uint32_t n = content.list->n;
        const bool join = !n ? is_among(l->no_parts, role) || is_among(l->no_text, role)
                             : is_among(n == 1 ? l->no_part : l->no_parts, role);
        if (join) content = joined_parts(m, content.list);
    }
    if (content.tag == MISSING || !truth(m, content)) {
        const Value *calls = find_key(message, NAME("tool_calls"));
        const bool has_calls = calls && truth(m, *calls);
        const Value where = has_calls ? LITERAL("calls") : role;
        if (has_calls && l->null_with_calls)
            content = none();
        else if (content.tag == NONE && is_among(l->text_for_null, where))
            content = LITERAL("");
        else if (content.tag == MISSING && is_among(l->text_for_missing, where))
            content = LITERAL("");
    }
    if (content.tag == STRING && is_among(l->no_text, role)) {
        const Value part = of_dict(m, 2);
        set_key(m, part.dict, GIVEN("type", number), GIVEN("text", number));
        set_key(m, part.dict, GIVEN("text", number), content);
        content = list_of(m, part);
    }
    if (content.tag == MISSING) return;
    if (given)
        *given = content;
    else
        set_key(m, message, GIVEN("content", number), content);
}

static Value adapt_tools(Machine *m, const Layout *l, Value tools) {
    if (tools.tag != LIST) return tools;
    bool wrap = false, bare = false;
    for (uint32_t i = 0; i < tools.list->n; i++) {
        wrap |= l->wrapped_tools && is_bare(tools.list->v[i]);
        bare |= l->bare_tools && find_key(tools.list->v[i].dict, NAME("function"));
    }
    for (uint32_t i = 0; i < tools.list->n; i++) {
        Value *tool = &tools.list->v[i];
        if (wrap) {
            if (is_bare(*tool)) *tool = wrapped(m, *tool, -1);
        } else if (bare) {
            const Value *function = find_key(tool->dict, NAME("function"));
            if (function) *tool = *function;
        }
    }
    return tools;
}

/* transformers passes reasoning under all of its names: {"thinking": r, **message, "reasoning_content": r} */
static void alias_reasoning(Machine *m, Value *message, int32_t number) {
    const Value names[] = {NAME("reasoning_content"), NAME("thinking"), NAME("reasoning")};
    const Value *reasoning = NULL;
    for (int i = 0; i < 3 && !reasoning; i++) {
        const Value *given = find_key(message->dict, names[i]);
        if (given && given->tag != NONE) reasoning = given;
    }
    if (!reasoning) return;
    const Value aliased = of_dict(m, message->dict->n + 2);
    set_key(m, aliased.dict, given_name(m, names[1], number), *reasoning); /* first, even where the message has its own */
    for (uint32_t i = 0; i < message->dict->n; i++)
        set_key(m, aliased.dict, message->dict->e[i].key, message->dict->e[i].value);
    set_key(m, aliased.dict, given_name(m, names[0], number), *reasoning);
    *message = aliased;
}

/* ---- columns beside the messages */

static void check_media(Machine *m, const Layout *l, const Dict *row) {
    for (uint32_t i = 0; i < l->media.list->n; i++) {
        const Value *given = find_key(row, l->media.list->v[i]);
        if (given && truth(m, *given)) unusual(m);
    }
}

static bool is_given(Value v) { /* neither null nor empty */
    switch (v.tag) {
    case NONE: return false;
    case STRING: return v.size > 0;
    case LIST: return v.list->n > 0;
    case DICT: return v.dict->n > 0;
    default: return true;
    }
}

static bool is_false(Machine *m, Value label) { /* as `label_of` reads labels */
    if (label.tag == FLOAT) return label.d == 0;
    if (label.tag != STRING) return is_number(label) && !label.i;
    const Value word = strip(m, label, NULL, true, true);
    return IS(word, "0") || (word.size == 5 && !strncasecmp(word.s, "false", 5));
}

static uint8_t column_notes(Machine *m, const Layout *l, const Dict *row) {
    const Value *label = find_key(row, NAME("label"));
    const uint8_t notes = label && is_false(m, *label) ? ROW_LABEL_FALSE : 0;
    for (uint32_t i = 0; i < l->near.list->n; i++) {
        const Value *given = find_key(row, l->near.list->v[i]);
        if (given && is_given(*given)) return notes | ROW_COLUMN_UNUSED;
    }
    return notes;
}

static Value read_tools(Machine *m, const Layout *l, const Dict *row) {
    const Value *given = get(row, l->tools);
    if (!given) return none();
    Value tools = *given;
    if (tools.tag == STRING) { /* the text "no tools" means none; an empty list is passed on */
        tools = strip(m, tools, NULL, true, true).size ? json_text(m, tools, -1) : none();
        if (!truth(m, tools)) tools = none();
    }
    if (tools.tag == NONE) return tools;
    if (tools.tag != LIST) unusual(m);
    for (uint32_t i = 0; i < tools.list->n; i++) {
        if (tools.list->v[i].tag == STRING) tools.list->v[i] = json_text(m, tools.list->v[i], -1);
        if (tools.list->v[i].tag != DICT) unusual(m);
    }
    return tools;
}

static const Dict *read_variables(Machine *m, const Layout *l, const Dict *row) {
    const Value *given = get(row, l->variables);
    if (!given) return NULL;
    Value found = *given;
    if (found.tag == STRING && strip(m, found, NULL, true, true).size) found = json_text(m, found, -1);
    if (found.tag == STRING || !truth(m, found)) return NULL;
    if (found.tag != DICT) unusual(m);
    for (uint32_t i = 0; i < found.dict->n; i++)
        if (is_among(l->reserved, found.dict->e[i].key)) unusual(m);
    return found.dict;
}

static Value read_system(Machine *m, const Layout *l, const Dict *row) { /* an empty string if there is none */
    const Value *given = get(row, l->system);
    if (!given || given->tag == NONE) return LITERAL("");
    if (given->tag != STRING) unusual(m);
    return *given;
}

/* ---- messages */

static Value saying(Machine *m, Value role, Value text, int32_t number) {
    const Value message = of_dict(m, 2);
    set_key(m, message.dict, GIVEN("role", number), role);
    set_key(m, message.dict, GIVEN("content", number), owned(m, text, number));
    return message;
}

/* Assign message indices to the elements of a column. */
static void number_sources(Machine *m, const Dict *row, const Value *column, int32_t first) {
    int32_t number = first;
    for (size_t i = 0; i < m->sources.n; i++)
        if (column == &row->e[m->sources.at[i].column].value) m->sources.at[i].message = number++;
}

static bool starts_with_system(const Layout *l, const List *messages) {
    const Value *role = messages->n && messages->v[0].tag == DICT ? find_key(messages->v[0].dict, l->role_key) : NULL;
    const Value *known = role && role->tag == STRING ? find_key(l->roles.dict, keyed(*role)) : NULL;
    return known && IS(*known, "system");
}

static void read_messages(Machine *m, const Layout *l, const Dict *row, Conversation *c) {
    const Value *column = get(row, l->messages), system = read_system(m, l, row);
    if (!column || column->tag != LIST || !column->list->n) unusual(m);
    const List *given = column->list;
    const uint32_t before = system.size && !starts_with_system(l, given);
    const uint32_t n = given->n + before;
    number_sources(m, row, column, (int32_t)before);
    c->messages = of_list(m, n, PLAIN_LIST);
    c->roles = arena(m, n);
    c->weights = arena(m, n * sizeof(float));
    bool weighted = false;
    if (before) {
        c->messages.list->v[0] = saying(m, NAME("system"), system, 0);
        c->roles[0] = ROLE_SYSTEM;
        c->weights[0] = NAN;
    }
    for (uint32_t i = before; i < n; i++) {
        const Value message = given->v[i - before];
        c->roles[i] = role_number(read_message(m, l, message, (int32_t)i, &c->weights[i]));
        c->messages.list->v[i] = message;
        weighted |= !isnan(c->weights[i]);
    }
    if (!weighted) c->weights = NULL;
    if (system.size && !before) {
        const Value *content = find_key(c->messages.list->v[0].dict, NAME("content"));
        if (!content || content->tag != STRING || compare_text(*content, system)) unusual(m);
    }
}

/* Alpaca and the like: earlier pairs, a question with its input below it, an answer. */
static void read_answer(Machine *m, const Layout *l, const Dict *row, Conversation *c) {
    const Value system = read_system(m, l, row), empty = of_list(m, 0, PLAIN_LIST);
    const Value *history = get(row, l->history), *query = get(row, l->query), *input = get(row, l->input),
                *response = get(row, l->response);
    if (!history || !truth(m, *history)) history = &empty;
    if (history->tag != LIST || !query || query->tag != STRING || !response || response->tag != STRING) unusual(m);
    const bool has_input = input && truth(m, *input);
    if (has_input && input->tag != STRING) unusual(m);
    const uint32_t n = 2 * history->list->n + 2 + (system.size > 0);
    c->messages = of_list(m, n, PLAIN_LIST);
    c->roles = arena(m, n);
    c->weights = NULL;
    Value *to = c->messages.list->v;
    int32_t at = 0;
    if (system.size) to[at] = saying(m, NAME("system"), system, at), at++;
    for (uint32_t i = 0; i < history->list->n; i++) {
        const Value pair = history->list->v[i];
        if (pair.tag != LIST || pair.list->n != 2) unusual(m);
        if (pair.list->v[0].tag != STRING || pair.list->v[1].tag != STRING) unusual(m);
        to[at] = saying(m, NAME("user"), pair.list->v[0], at), at++;
        to[at] = saying(m, NAME("assistant"), pair.list->v[1], at), at++;
    }
    Value question = *query;
    if (has_input && question.size) {
        const size_t mark = m->out.n;
        put(m, question.s, question.size);
        PUT(m, "\n\n");
        put(m, input->s, input->size);
        question = take_output(m, mark);
    } else if (has_input) {
        question = *input;
    }
    to[at] = saying(m, NAME("user"), question, at), at++;
    to[at] = saying(m, NAME("assistant"), *response, at), at++;
    for (int32_t i = 0; i < at; i++) c->roles[i] = role_number(*find_key(to[i].dict, NAME("role")));
}

/* A conversation read by Python: {"messages", "tools", "variables"}, and "spans" if it has any. */
static void read_conversation(Machine *m, const Dict *row, Conversation *c) {
    const Value *messages = find_key(row, NAME("messages")), *tools = find_key(row, NAME("tools")),
                *variables = find_key(row, NAME("variables"));
    if (!messages || messages->tag != LIST || !tools || !variables) unusual(m);
    number_sources(m, row, messages, 0);
    const uint32_t n = messages->list->n;
    c->messages = *messages;
    c->roles = arena(m, n + 1);
    c->weights = NULL;
    c->tools = *tools;
    c->variables = variables->tag == DICT ? variables->dict : NULL;
    const Value *spans = find_key(row, NAME("spans"));
    c->spans = spans && spans->tag == LIST ? spans->list : NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (messages->list->v[i].tag != DICT) unusual(m);
        Value *role = find_key(messages->list->v[i].dict, NAME("role"));
        if (role && (role->tag == LIST || role->tag == DICT)) unusual(m);
        if (role && role->tag == STRING) *role = owned(m, *role, -1); /* roles have no origin */
        c->roles[i] = role ? role_number(*role) : ROLE_OTHER;
    }
    if (tools->tag != NONE && tools->tag != LIST) unusual(m);
    for (uint32_t i = 0; tools->tag == LIST && i < tools->list->n; i++)
        if (tools->list->v[i].tag != DICT) unusual(m);
}

/* ---- special-token text inside messages */

static int32_t needle_at(const Layout *l, const char *p, size_t left) { /* needles are sorted, longest first */
    if (left < 2 || !l->needle_pairs[byte_pair(p)]) return -1; /* some tokenizers have a thousand of them */
    for (uint32_t i = 0; i < l->needles.list->n; i++) {
        const Value needle = l->needles.list->v[i];
        if (needle.size <= left && !memcmp(p, needle.s, needle.size)) return (int32_t)i;
    }
    return -1;
}

static int32_t needle_in(const Layout *l, Value text) { /* the first match; needles start with one of a few bytes */
    int32_t found = -1;
    const char *end = text.s + text.size, *limit = end;
    for (uint32_t k = 0; k < l->needle_start_count; k++)
        for (const char *p = text.s; p < limit && (p = memchr(p, l->needle_starts[k], (size_t)(limit - p))); p++) {
            const int32_t needle = needle_at(l, p, (size_t)(end - p));
            if (needle < 0) continue;
            found = needle;
            limit = p;
        }
    return found;
}

static int32_t find_needle(Machine *m, const Layout *l, Value v, int depth) {
    int32_t found = -1;
    if (depth > MAX_DEPTH) give_up(m, "values nested too deeply");
    if (v.tag == STRING) {
        found = needle_in(l, v);
    } else if (v.tag == LIST) {
        for (uint32_t i = 0; i < v.list->n && found < 0; i++) found = find_needle(m, l, v.list->v[i], depth + 1);
    } else if (v.tag == DICT) {
        for (uint32_t i = 0; i < v.dict->n && found < 0; i++) {
            found = find_needle(m, l, v.dict->e[i].key, depth + 1);
            if (found < 0) found = find_needle(m, l, v.dict->e[i].value, depth + 1);
        }
    }
    return found;
}

/* ---- the row */

void read_row(Machine *m, const Layout *l, const char *row, size_t n, Conversation *c) {
    json_begin(m, row, n);
    const Value parsed = json_row(m);
    if (parsed.tag != DICT) unusual(m);
    *c = (Conversation){.layout = l, .needle = -1};
    if (l->reading == READ_CONVERSATION) {
        read_conversation(m, parsed.dict, c);
    } else {
        check_media(m, l, parsed.dict);
        c->notes = column_notes(m, l, parsed.dict);
        c->tools = read_tools(m, l, parsed.dict);
        c->variables = read_variables(m, l, parsed.dict);
        if (l->reading == READ_MESSAGES)
            read_messages(m, l, parsed.dict, c);
        else
            read_answer(m, l, parsed.dict, c);
        c->tools = adapt_tools(m, l, c->tools);
    }
    const List *messages = c->messages.list;
    m->roles = c->roles;
    m->message_count = (int32_t)messages->n;
    bool answered = l->reading == READ_CONVERSATION;
    for (uint32_t i = 0; i < messages->n; i++) {
        Dict *d = messages->v[i].dict;
        if (l->reading != READ_CONVERSATION) {
            adapt_calls(m, l, d, (int32_t)i, &c->notes);
            adapt_content(m, l, d, *find_key(d, NAME("role")), (int32_t)i);
        }
        answered |= c->roles[i] == ROLE_ASSISTANT;
    }
    if (!answered) unusual(m);
    if (l->needles.list->n) {
        c->needle = find_needle(m, l, c->messages, 0);
        if (c->needle < 0) c->needle = find_needle(m, l, c->tools, 0);
    }
    for (uint32_t i = 0; i < messages->n; i++) { /* after the search, which handles reasoning itself */
        alias_reasoning(m, &messages->v[i], (int32_t)i);
        messages->v[i].dict->message = (int32_t)i;
    }
    read_fields(m, c);
}
