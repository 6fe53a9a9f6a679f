"""One-line bugs for mutation testing, as (file, original text, mutated text): in the template machine, in the pipeline."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

from typing import Final

_NATIVE = "penstock/native/"

TEXT: Final = (
    ("while (right && p < end) {", "while (right && left && p < end) {"),
    ("return i < n ? i : step > 0 ? n : n - 1;", "return i < n ? i : step > 0 ? n - 1 : n - 1;"),
    ("if (i < 0) return step > 0 ? 0 : -1;", "if (i < 0) return 0;"),
    ("for (; i < n && index; index--) {", "for (; i < n && index > 1; index--) {"),
    ("(upper || title) ? c - 32 * is_lower", "upper ? c - 32 * is_lower"),
    ("most != 0 && (q = find(m, p, (size_t)(end - p), separator->s", "(q = find(m, p, (size_t)(end - p), separator->s"),
    ("p = q + old.size;", "p = q + 1;"),
    ("if (is_first ? first : q > p) put(m, by.s, by.size);", "put(m, by.s, by.size);"),
    ("    if (i < 0) i += n;\n    if (i < 0 || i >= n)", "    if (i < 0) i += n - 1;\n    if (i < 0 || i >= n)"),
    ("for (; p <= last; p++) {", "for (; p < last; p++) {"),
    ("(c == 0xED && s[1] > 0x9F)) return false;", "false) return false;"),
    ("if (p > word) APPEND(m, m->parsed, of_string(word", "APPEND(m, m->parsed, of_string(word"),
    ("if (own == size && !memcmp(chars.s + i, p, (size_t)size)) return true;", "if (own == size) return true;"),
)
CHARACTERS: Final = (
    ("(c >= 0x1c && c <= 0x1e)", "(c >= 0x1d && c <= 0x1e)"),
    ("return c == 0x85 || c == 0xa0", "return c == 0xa0"),
    ('character, "title")', 'character, "upper")'),
)
JSON_IN: Final = (
    ('*const meant = "\\"\\\\/\\b\\f', '*const meant = "\\"\\\\/\\f\\b'),
    ("((c - 0xD800) << 10)", "((c - 0xD800) << 9)"),
    ("m->parsed.at[at + 1] = own;", "(void)own;"),
    ("return of_int(*s == '-' ? -value : value);", "return of_int(value);"),
    ('take_word(m, "false", 5)) return of_bool(false);', 'take_word(m, "false", 5)) return of_bool(true);'),
    ('if (m->json != m->json_end) give_up(m, "not JSON");\n    return row;', "return row;"),
    ("if (high && !is_utf8(found.s, found.size))", "if (false && high)"),
    ("p = *p == '0' ? p + 1 : digits(p, end);", "p = digits(p, end);"),
)
JSON_OUT: Final = (
    ("if (c < 0x7f) {", "if (c < 0x80) {"),
    ('*const escaped = "\\"\\\\bfnrt"', '*const escaped = "\\"\\\\bfnrn"'),
    ("memchr(s.s, '\\'', s.size) && !memchr(s.s, '\"', s.size) ?", "memchr(s.s, '\\'', s.size) ?"),
    ("if (list->kind == TUPLE && list->n == 1) put_char(m, ',');", ""),
    ("exponent < -4 || exponent >= 16", "exponent < -4 || exponent > 16"),
    (
        "for (int i = 0; i < level; i++) put(m, style->indent.s",
        "for (int i = 0; i <= level; i++) put(m, style->indent.s",
    ),
    ("order(m, e[k - 1].key, d->e[i].key) > 0", "order(m, e[k - 1].key, d->e[i].key) < 0"),
    ("put_json(m, v.list->v[i], style, level + 1);", "put_json(m, v.list->v[i], style, level);"),
    ("} else if (is_printable(m, c)) {", "} else if (c > 0x1f && c != 0x7f) {"),
    ("0xDC00 + ((c - 0x10000) & 1023)", "0xDC00 + ((c - 0x10000) & 511)"),
)
FILTERS: Final = (
    (
        "case FILTER_upper: return change_case(m, to_text(m, v), UPPER);",
        "case FILTER_upper: return change_case(m, to_text(m, v), LOWER);",
    ),
    ("!(n > 2 && truth(m, a[2]) && !truth(m, v))", "!(n > 2 && !truth(m, v))"),
    (
        "insert(m, result.list->v, keys, i, item, without_case(m, key));",
        "insert(m, result.list->v, keys, i, item, key);",
    ),
    ("n - 1 - by_attribute) == wanted)", "n - 1 - by_attribute) != wanted)"),
    ("if (k < n) continue;", "if (k + 1 < n) continue;"),
    ("largest ? item.i > found.i", "largest ? item.i >= found.i"),
    ("list.list->v[list.list->n - 1] : undefined()", "list.list->v[0] : undefined()"),
    ("value = value * 10 + (v.s[i] - '0');", "value = value * 8 + (v.s[i] - '0');"),
    ('style.between = LITERAL(",");', 'style.between = LITERAL(", ");'),
    ("if (!truth(m, v)) return of_list(m, 0, GENERATOR); /*", "if (false) return of_list(m, 0, GENERATOR); /*"),
    (
        "case FILTER_trim: return strip(m, to_text(m, v), n > 1 ? &a[1] : NULL, true, true);",
        "case FILTER_trim: return strip(m, to_text(m, v), NULL, true, true);",
    ),
    ('return n > 1 ? a[1] : LITERAL("");', 'return LITERAL("");'),
)
OPERATIONS: Final = (
    ("if (i) put_traced(m, separator.s, separator.size);", "if (i > 1) put_traced(m, separator.s, separator.size);"),
    ('IS(name, "last")) return of_bool(it->i == it->n);', 'IS(name, "last")) return of_bool(it->i + 1 == it->n);'),
    ("it->tests ? it->previous : it->v[i - 1];", "it->v[i - 1];"),
    ("    if (it->testing) { /* jinja2", "    if (false) { /* jinja2"),
    (
        "if (m->guards) give_up(m, \"a loop's filter that reads a namespace",
        "if (false) give_up(m, \"a loop's filter that reads a namespace",
    ),
    ('IS(name, "revindex0")) return of_int(it->n - i - 1);', 'IS(name, "revindex0")) return of_int(it->n - i);'),
    ("        if (methods & OF_DICT) return method_value(m, v, name);\n        found", "        found"),
    ("return methods & OF_DICT ? method_value(m, v, name) : undefined();", "return undefined();"),
    ("at = i < 0 ? i + n : i;", "at = i;"),
    ("v.list->kind <= RANGE);", "v.list->kind <= VIEW);"),
    ("case TEST_integer: return v.tag == INT;", "case TEST_integer: return is_number(v);"),
    ("at_end ? s.s + s.size - affix.size : s.s", "s.s"),
    ("found |= has_affix(m, s, affix.list->v[i], at_end);", "found = has_affix(m, s, affix.list->v[i], at_end);"),
    ('PUT(m, "&#39;"); break;', 'PUT(m, "\'"); break;'),
    ("of_string(s.s + a[0].size, s.size - a[0].size) : s;", "s : s;"),
    ("found ? *found : n == 2 ? a[1] : none();", "found ? *found : none();"),
    ("case TEST_defined: return v.tag != UNDEFINED;", "case TEST_defined: return true;"),
    ("what == KEYS ? d->e[i].key : d->e[i].value;", "what == KEYS ? d->e[i].value : d->e[i].key;"),
    ("if (c == '{' && next == '}') {", "if (c == '{' && next) {"),
    ("(int64_t)count_points(s.s, (size_t)(found - s.s)) : -1", "(int64_t)(found - s.s) : -1"),
)
VALUES: Final = (
    (
        "if (is_number(a) && is_number(b)) return a.i == b.i;",
        "if (is_number(a) && is_number(b)) return a.tag == b.tag && a.i == b.i;",
    ),
    ("case LIST: return v.list->kind >= GENERATOR || v.list->n != 0;", "case LIST: return v.list->n != 0;"),
    ("case STRING: return v.size != 0;", "case STRING: return true;"),
    ("return (a.i > b.i) - (a.i < b.i);", "return (a.i < b.i) - (a.i > b.i);"),
    ("return found ? found : (a.size > b.size) - (a.size < b.size);", "return found;"),
    ("if (!other || !equal(m, a->e[i].value, *other, depth + 1)) return false;", "if (!other) return false;"),
    ("        *known = value;\n        return;", "        return;"),
    ("case FLOAT: return v.d != 0;", "case FLOAT: return true;"),
)
INTERPRETER: Final = (
    ("branch(m, pc[1], !truth(m, *sp)) ?", "branch(m, pc[1], truth(m, *sp)) ?"),
    ("truth(m, sp[-1]) == (op == OP_JUMP_TRUE_KEEP)", "truth(m, sp[-1]) == (op == OP_JUMP_FALSE_KEEP)"),
    ("BINARY(of_bool(!contains(m, a, b)))", "BINARY(of_bool(contains(m, a, b)))"),
    ("BINARY(of_bool(order(m, a, b) <= 0))", "BINARY(of_bool(order(m, a, b) < 0))"),
    ("a.i / b.i - (result < 0)", "a.i / b.i"),
    ("result < 0 ? result + b.i : result", "result"),
    ("of_int(low + i * by)", "of_int(low + i)"),
    ("const Value key = a[2 * i];", "const Value key = a[2 * (n - 1 - i)];"),
    ("return q ? of_string(p, (size_t)(q - p)) : s;", "return s;"),
    (
        "for (int i = *pc++ - 1; i >= 0; i--) PUSH(list.list->v[i]);",
        "for (int i = 0, n = *pc++; i < n; i++) PUSH(list.list->v[i]);",
    ),
    ("drop_output(m, m->captures[it->captures]);", ""),
    ("m->generations[m->generation_count++] = m->out.n;", "m->generations[m->generation_count++] = m->text_start;"),
    ("if (truth(m, test)) it->kept", "if (!truth(m, test)) it->kept"),
    ("own ? *own : otherwise;", "otherwise;"),
    ("set_key(m, sp[1].dict, k[*pc++], sp[0]);", "pc++;"),
    ("if (branch(m, pc[2], locals[pc[0]].tag != MISSING))", "if (branch(m, pc[2], true))"),
    ("== (op == OP_EQ_TEXT));", "== (op == OP_NE_TEXT));"),
    (
        "for (int i = 0; i < n; i++) put_traced(m, a[i].s, a[i].size);",
        "for (int i = n - 1; i >= 0; i--) put_traced(m, a[i].s, a[i].size);",
    ),
    ("        m->lost = true;\n        return;", "        return;"),
    ("while (hops--) at = m->calls[at].outer;", "while (hops-- > 1) at = m->calls[at].outer;"),
    ("CASE(LOOP_DONE): m->loops[m->loop_count - 1].done = true; break;", "CASE(LOOP_DONE): break;"),
    ("it->depth = m->calls[it->call].depth;", ""),
    ("else if (call.op == OP_CALL_PRINT)", "else"),
    ('if (sp[-1].tag == UNDEFINED) give_up(m, "a macro that reads', 'if (false) give_up(m, "a macro that reads'),
    ("it->previous = it->current;", ""),
    ("it->is_owned = it->message >= 0;", "it->is_owned = true;"),
    (
        "set_key(m, made.dict, e.key, e.value);",
        "if (!find_key(made.dict, e.key)) set_key(m, made.dict, e.key, e.value);",
    ),
)
CALLS: Final = (
    ("        int k = n;\n", "        int k = 0;\n"),
    ("m->calls[outer].serial != v.size", "false"),
    ("call->outer, it->depth + 1}", "call->outer, it->depth}"),
    ("if (look_up(m, named, name)) give_up(m,", "if (false) give_up(m,"),
    (
        "caller.tag == MISSING || caller.tag == NONE ? undefined() : caller",
        "caller.tag == MISSING ? undefined() : caller",
    ),
    ("places.list->v + wanted", "places.list->v"),
    ("it->changed = kept.list;", ""),
    ("return a[(it->index - 1) % n];", "return a[it->index % n];"),
    ("is_same = equal(m, it->changed->v[i], a[i], 0);", "is_same = true;"),
)
VERIFY: Final = (
    ("return state->depth == depth && state->block == block", "return state->block == block"),
    ("(to > from || takes_item(op_at(w, to))) && reach", "reach"),
    ("if (w->states[at].depth < popped) return false;", ""),
    ("if (op_at(w, inner) != begun) return false;", "if (inner < 0) return false;"),
    ("return w->macro >= 0 && i < p->macros[w->macro].locals;", "return true;"),
    ("return macro >= 0 && slot < w->p->macros[macro].locals;", "return macro >= 0;"),
    ("i < p->macro_count && p->macros[i].parent == w->macro;", "i < p->macro_count;"),
    ("macro->locals - taken(macro->takes)", "macro->locals"),
)
PROVENANCE: Final = (
    ("        copy_one(m, 0, n, message, false, to);\n        return;", "        return;"),
    ("is_assistant(m, p.message) ? message : p.message", "message"),
    ("is_assistant(m, p.message) ? message : p.message", "p.message"),
    ("(Span){start, m->out.n, message, looped};", "(Span){m->spans.at[first].start, m->out.n, message, looped};"),
    ("    claim(m, at, m->out.n, message);\n", ""),
    ("add_origin(m, text + (p.start - mark), p.end", "add_origin(m, text, p.end"),
    ("p >= (raw ? s->raw : s->decoded) ? s->message : -1", "s->message"),
    ("if (m->open_messages && !m->building) {", "if (m->open_messages) {"),
    ("if (m->spans.at[i].message != message) return;", ""),
    ("m->roles[message] == ROLE_ASSISTANT; }", "m->roles[message] == 2; }"),
    ("looped |= m->spans.at[i].looped;", ""),
    ("if (o.start >= s + n) break;", "if (o.start > s) break;"),
)
ROWS: Final = (
    ("return v.i ? 0.0 : 1.0;", "return v.i ? 1.0 : 0.0;"),
    ('IS(role, "tool")      ? ROLE_TOOL', 'IS(role, "tool") ? 2'),
    ("        c->roles[0] = ROLE_SYSTEM;\n", "        c->roles[0] = 2;\n"),
    ('        PUT(m, "\\n\\n");\n', '        PUT(m, "\\n");\n'),
    ('saying(m, NAME("user"), pair.list->v[0], at)', 'saying(m, NAME("user"), pair.list->v[1], at)'),
    ("set_key(m, aliased.dict, given_name(m, names[1], number), *reasoning);", ""),
    ("message->e[kept++] = message->e[i];", "kept++;"),
    ("return of_dict(m, 0);\n    const Value found = json_text", "return none();\n    const Value found = json_text"),
    ("        if (!truth(m, tools)) tools = none();\n", ""),
    ("needle.size <= left", "needle.size < left"),
    ("if (left < 2 || !l->needle_pairs", "if (left < 3 || !l->needle_pairs"),
    ("if (is_among(l->reserved, found.dict->e[i].key)) unusual(m);", ""),
    ("if (given && truth(m, *given)) unusual(m);", ""),
    ("if (weight > 3.4e38) unusual(m);", ""),
    ("if (!(weight >= 0)) unusual(m);", ""),
    ("if (!isnan(weight) && !isnan(own) && own != weight) unusual(m);", ""),
    ("        remove_key(message, given);\n        if (!isnan(weight)", "        if (!isnan(weight)"),
    ("compare_text(*content, system)) unusual(m);", "false) unusual(m);"),
    ("    if (!answered) unusual(m);\n", ""),
    ("if (l->no_empty_calls) remove_key(message, calls);", ""),
    ("number_sources(m, row, column, (int32_t)before);", "number_sources(m, row, column, 0);"),
    ("messages->v[i].dict->message = (int32_t)i;", "messages->v[i].dict->message = 0;"),
    ("        if (join) content = joined_parts(m, content.list);\n", ""),
    ('if (find_key(message, to)) unusual(m);', ""),
)  # fmt: skip
SHOWN: Final = (
    ("if (occurrences(m, text, name) >= times) return true;", "if (occurrences(m, text, name) >= 1) return true;"),
    ("is_list ? content->list->v[i] : *content;", "is_list ? content->list->v[i] : none();"),
    ("message->flags |= MESSAGE_KEY_DROPPED;", ";"),
    ("message.where = message.is_answer ? &own : &whole;", "message.where = &whole;"),
)  # fmt: skip
PROGRAM: Final = (
    ("const bool known = !m->lost;", "const bool known = true;"),
    ("b->fresh[row] = m->fresh.n > 0;", "b->fresh[row] = 0;"),
    ("m->branches[m->fresh.at[i]] = 0;", "m->branches[m->fresh.at[i]] = 1;"),
    ("(!p.looped && looped[p.message] && m->roles[p.message] == ROLE_ASSISTANT)", "false"),
    ("        m->tags.n = tags;\n        b->spans.n", "        b->spans.n"),
    ("b->roles.n = b->flags.n = b->weights.n = roles;", ""),
    ("m->lost = m->refused = m->building = false;", "m->refused = m->building = false;"),
    ("c->weights ? c->weights[i] : NAN", "NAN"),
    ("[SPAN_END] = (int32_t)(p.end - m->text_start)", "[SPAN_END] = (int32_t)(p.end - p.start)"),
)
COMPILER: Final = (
    ('            self.code.variable("CLEAR", target)\n            if action', "            if action"),
    (
        "            self._body(branch.body, frame)\n            self.code.jump(end)\n",
        "            self._body(branch.body, frame)\n",
    ),
    ("if -at <= len(node.defaults):", "if -at < len(node.defaults):"),
    ("self._loops.append((again, end))", "self._loops.append((end, end))"),
    ("if name in self.variables:\n            value = self.variables[name]", "if False:\n            value = None"),
    ("if calls(node.test) or any(body.find(nodes.NSRef)", "if any(body.find(nodes.NSRef)"),
    ("node.recursive or looks_ahead(node) or", "node.recursive or"),
    ("self.code.scopes[-1].ended.add(target)", "pass"),
    ("self.missing = {frame.symbols.ref(later.name) for later in node.args[index:]}", "self.missing = set()"),
    ("loops, self._loops = self._loops, []  #", "loops = self._loops  #"),
)
NAMES: Final = (
    ("    (AttributeOf.DICT, dict),\n", ""),
    ('return not name.startswith("_") and not attribute_bits(name)', "return False"),
    ("        return True  # another loop's\n", "        pass\n"),
)
EXPRESSIONS: Final = (
    ("int(number == -1)", "int(number == 0)"),
    ("_TOJSON_DEFAULTS: Final = (False, None, None, False)", "_TOJSON_DEFAULTS: Final = (True, None, None, False)"),
    (
        '"JUMP_FALSE_KEEP" if isinstance(node, nodes.And) else "JUMP_TRUE_KEEP"',
        '"JUMP_TRUE_KEEP" if isinstance(node, nodes.And) else "JUMP_FALSE_KEEP"',
    ),
    ('            if op == "notin":\n                self.code.op("NOT")\n', ""),
    ('self.code.branch("JUMP_TRUE", otherwise)', 'self.code.branch("JUMP_FALSE", otherwise)'),
    ('or "," in node.value:', "or False:"),
    ("for part in reversed(parts):", "for part in parts:"),
)
ALIGN: Final = (
    ("        } else if (*at == ' ' && is_bar(piece, piece_end)) {", "        } else if (false) {"),
    ("    if (rule & RULE_PREPENDS) return true;", "    if (rule & RULE_PREPENDS) return first;"),
    ("    if (rule & RULE_PREPENDS) return true;", "    if (rule & RULE_PREPENDS) return false;"),
    ("    return at < end && *at != ' ' && !is_bar(at, end);", "    return at < end && *at != ' ';"),
    ("kind == TOKEN_PIECE || kind == TOKEN_ADDED_OR_PIECE;", "kind == TOKEN_PIECE;"),
    ("        starts = kind >= TOKEN_ADDED;", "        starts = kind == TOKEN_ADDED;"),
    ("reached = at - text + width(*at);", "reached = at - text + 1;"),
    ("        if (at - text > reached) reached = at - text;", "        reached = at - text;"),
    ("    return at == end;\n}\n\n/* A token", "    return true;\n}\n\n/* A token"),
    ("if (inclusive[s] && k < n && (k ? ends[k - 1] : 0) < cuts[s]) count++;", ""),
    ("k + (inclusive[s] && k < n && at < cut);", "k;"),
    ("if (next > cut) break;", "if (next >= cut) break;"),
    ("    return (size_t)at == size;", "    return true;"),
    ("        if (ids[i] >= p->count) return false;", ""),
    ("            if (ids[k] >= count) return false;", ""),
)

MUTATIONS: Final = tuple(
    (file, old, new)
    for file, table in (
        (f"{_NATIVE}text.c", TEXT),
        (f"{_NATIVE}characters.c", CHARACTERS),
        (f"{_NATIVE}json_reader.c", JSON_IN),
        (f"{_NATIVE}json_writer.c", JSON_OUT),
        (f"{_NATIVE}filters.c", FILTERS),
        (f"{_NATIVE}operations.c", OPERATIONS),
        (f"{_NATIVE}values.c", VALUES),
        (f"{_NATIVE}interpreter.c", INTERPRETER),
        (f"{_NATIVE}calls.c", CALLS),
        (f"{_NATIVE}verify.c", VERIFY),
        (f"{_NATIVE}provenance.c", PROVENANCE),
        (f"{_NATIVE}rows.c", ROWS),
        (f"{_NATIVE}shown.c", SHOWN),
        (f"{_NATIVE}program.c", PROGRAM),
        (f"{_NATIVE}align.c", ALIGN),
        ("penstock/prepare/template/compiler.py", COMPILER),
        ("penstock/prepare/template/expressions.py", EXPRESSIONS),
        ("penstock/prepare/template/names.py", NAMES),
    )
    for old, new in table
)

_ENCODER, _COLLATE, _POLICY = (
    "penstock/prepare/encode/encoder.py",
    "penstock/load/collate.py",
    "penstock/load/policy.py",
)
_PIPELINE, _BATCH, _LINES = (
    "penstock/prepare/pipeline.py",
    "penstock/prepare/encode/example_batch.py",
    "penstock/prepare/sources/text_rows.py",
)

PIPELINE: Final = (
    # wrong tokens
    (_ENCODER, "            return Encoded(ids, offsets, Counter())", "            return Encoded(ids ^ (np.arange(len(ids)) == 9), offsets, Counter())"),
    (_ENCODER, "        if not slow:\n", "        if True:\n"),
    (_ENCODER, "return _spliced(ids, offsets, slow, served), np", "return Encoded(ids, offsets, served.fallbacks), np"),
    ("penstock/prepare/encode/engines.py", "return np.array(layout.content.data), np", "return np.array(layout.content.data) ^ 1, np"),
    (_BATCH, "    if inspected.decomposed:\n        texts,", "    if False:\n        texts,"),
    (_PIPELINE, "with_prefix_and_suffix(self._encode(plain, state), self.encoder.prefix, self.encoder.suffix)", "self._encode(plain, state)"),
    # wrong masks
    ("penstock/prepare/encode/example_batch.py", 'counts = np.searchsorted(token_ends, ends, side="right")', 'counts = np.searchsorted(token_ends, ends, side="left")'),
    ("penstock/prepare/regions/splitter.py", "HEADER_UNKNOWN\n        known[list(outcome.lost)] = False\n", "HEADER_UNKNOWN\n"),
    (_POLICY, "return runs.of_part(Part.BODY, Part.STOP)", "return runs.of_part(Part.BODY)"),
    (_POLICY, "trained = runs.messages > np.repeat(last, runs.counts)", "trained = runs.messages > np.repeat(last, runs.counts) + 1"),
    (_COLLATE, "    labels[first], weights[first] = IGNORED, 0\n", ""),
    (_COLLATE, ">= (inside.argmax(axis=1) + prompts)", "> (inside.argmax(axis=1) + prompts)"),
    (_COLLATE, "return np.where(weights > 0, ids, IGNORED)", "return np.where(weights >= 0, ids, IGNORED)"),
    # lost, repeated or misplaced rows
    (_LINES, "    if partial.size:\n        yield", "    if False:\n        yield"),
    (_LINES, "            position += stop - first\n", ""),
    (_LINES, "filled = np.flatnonzero(np.diff(before))\n", "filled = np.flatnonzero(np.diff(before) > 1)\n"),
    ("penstock/prepare/slice_record.py", "        first = stop\n", "        first = stop + 1\n"),
    (_PIPELINE, "        plain = self._render_read(rows.rows, left, examples, state)", "        plain = self._render_read(rows.rows, left[1:], examples, state)"),
    (_PIPELINE, "batch = batch.taken(order) if np.any(np.diff(order) < 0) else batch", "pass"),
    ("penstock/prepare/sources/parquet.py", "                self._left = batch.slice(last)\n", "                pass\n"),
    ("penstock/load/plan.py", "positions = np.arange(local * size, (local + steps) * size)", "positions = np.arange(local * size, (local + steps) * size - (local > 2))"),
    ("penstock/load/plan.py", "self._kept[0] != epoch:", "False:"),
)  # fmt: skip
