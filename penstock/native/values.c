/* The arena, lists and dicts, and equality. */

#include "values.h"

_Noreturn void give_up(Machine *m, const char *why) {
    m->why = why;
    longjmp(m->on_give_up, 1);
}

void *grown(Machine *m, void *array, size_t *capacity, size_t size) {
    const size_t wanted = *capacity ? *capacity * 2 : 256;
    if (wanted * size > MAX_VECTOR) give_up(m, "too many pieces of text");
    void *larger = realloc(array, wanted * size);
    if (!larger) give_up(m, "out of memory");
    *capacity = wanted;
    return larger;
}

/* ---- the arena: chunks that double in size, so that there are few of them */

void *arena_slow(Machine *m, size_t size) {
    if (size > MAX_TEXT * 4) give_up(m, "a value is too large");
    while (m->current && m->current->next) {
        m->current = m->current->next;
        m->current->used = 0;
        m->current->first_origin = m->current->last_origin = m->origins.n;
        m->current->first_label = m->current->last_label = m->labels.n;
        if (m->current->capacity >= size) {
            m->current->used = size;
            return m->current->data;
        }
    }
    size_t capacity = m->current ? m->current->capacity * 2 : (size_t)1 << 18;
    if (capacity > (size_t)16 << 20) capacity = (size_t)16 << 20;
    if (capacity < size) capacity = size;
    m->arena_size += capacity;
    if (m->arena_limit && m->arena_size > m->arena_limit) {
        m->arena_size -= capacity;
        give_up(m, "values take too much memory");
    }
    Chunk *chunk = malloc(sizeof(Chunk) + capacity);
    if (!chunk) give_up(m, "out of memory");
    *chunk = (Chunk){.capacity = capacity,
                     .used = size,
                     .first_origin = m->origins.n,
                     .last_origin = m->origins.n,
                     .first_label = m->labels.n,
                     .last_label = m->labels.n};
    if (m->current)
        m->current->next = chunk;
    else
        m->first = chunk;
    m->current = chunk;
    return chunk->data;
}

/* Start a row: reuse the chunks, unless a large row left many. */
void arena_reset(Machine *m, size_t limit) {
    if (m->arena_size > ARENA_BASE) {
        free_chunks(m->first);
        m->first = NULL;
        m->arena_size = 0;
    }
    m->arena_limit = limit;
    m->current = m->first;
    if (m->current) {
        m->current->used = 0;
        m->current->first_origin = m->current->last_origin = m->current->first_label = m->current->last_label = 0;
    }
}

void free_chunks(Chunk *chunk) {
    while (chunk) {
        Chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
}

void out_grow(Machine *m, size_t size) {
    size_t capacity = m->out.capacity ? m->out.capacity : (size_t)1 << 16;
    if (size > MAX_TEXT || m->out.n - m->text_start > MAX_TEXT) give_up(m, "the text is too large");
    while (capacity < m->out.n + size) capacity *= 2;
    char *larger = realloc(m->out.at, capacity);
    if (!larger) give_up(m, "out of memory");
    m->out.at = larger;
    m->out.capacity = capacity;
}

/* ---- lists and dicts */

Value of_list(Machine *m, uint32_t n, ListKind kind) {
    List *list = arena(m, sizeof *list);
    *list = (List){.n = n, .kind = (uint8_t)kind, .v = n ? arena(m, n * sizeof(Value)) : NULL};
    return (Value){.tag = LIST, .list = list};
}

Value of_dict(Machine *m, uint32_t capacity) {
    Dict *dict = arena(m, sizeof *dict);
    *dict = (Dict){.capacity = capacity, .message = -1, .e = capacity ? arena(m, capacity * sizeof(Entry)) : NULL};
    return (Value){.tag = DICT, .dict = dict};
}

/* Of at most 24 bytes: the first, the middle and the last eight. Only a filter: equal hashes are compared. */
uint16_t hash_of(const char *s, uint32_t n) {
    uint64_t first = 0, middle = 0, last = 0;
    if (n >= 8) {
        memcpy(&first, s, 8), memcpy(&middle, s + (n - 8) / 2, 8), memcpy(&last, s + n - 8, 8);
    } else {
        for (uint32_t i = 0; i < n; i++) first = first << 8 | (uint8_t)s[i];
    }
    uint64_t h = (first ^ n) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 29) ^ middle) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 32) ^ last) * 0x94D049BB133111EBu;
    return (uint16_t)(h >> 48);
}

/* ---- the index of a dict with many keys */

static uint64_t hash_of_all(const char *s, uint32_t n) {
    uint64_t h = n, word;
    for (; n >= 8; s += 8, n -= 8) {
        memcpy(&word, s, 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    for (word = 0; n; n--) word = word << 8 | (uint8_t)*s++;
    h = (h ^ word) * 0xBF58476D1CE4E5B9u;
    return h ^ h >> 32;
}

uint32_t *place_of(Machine *m, Index *index, const Entry *e, Value key) {
    charge(m, 8 + (size_t)key.size);
    uint32_t at = (uint32_t)hash_of_all(key.s, key.size) & index->mask;
    for (; index->places[at]; at = (at + 1) & index->mask) {
        const Value known = e[index->places[at] - 1].key;
        charge(m, 8);
        if (known.hash == key.hash && is_text(known, key.s, key.size)) break;
    }
    return &index->places[at];
}

Index *index_of(Machine *m, const Entry *e, uint32_t n) {
    uint32_t size = 2 * MAX_LINEAR;
    if (n > 1u << 26) give_up(m, "an object with too many keys");
    while (size < 4 * n) size *= 2;
    charge(m, 4 * (size_t)size);
    Index *index = arena(m, sizeof *index + size * sizeof *index->places);
    index->mask = size - 1;
    memset(index->places, 0, size * sizeof *index->places);
    for (uint32_t i = 0; i < n; i++)
        if (e[i].key.tag == STRING) *place_of(m, index, e, e[i].key) = i + 1;
    return index;
}

Value *look_up_indexed(Machine *m, const Dict *d, Value key) {
    if (!d->index) ((Dict *)d)->index = index_of(m, d->e, d->n); /* a cache */
    const uint32_t place = *place_of(m, d->index, d->e, key);
    return place ? &d->e[place - 1].value : NULL;
}

void set_key(Machine *m, Dict *d, Value key, Value value) {
    Value *known = look_up(m, d, key);
    if (known) {
        *known = value;
        return;
    }
    if (d->n == d->capacity) {
        const uint32_t capacity = d->capacity * 2 + 8;
        if (capacity > 1u << 27) give_up(m, "an object with too many keys");
        Entry *larger = arena(m, capacity * sizeof(Entry));
        if (d->n) memcpy(larger, d->e, d->n * sizeof(Entry));
        d->e = larger;
        d->capacity = capacity;
    }
    d->e[d->n++] = (Entry){key, value};
    if (d->index && is_full(d->index, d->n))
        d->index = NULL; /* the next look-up makes a larger one */
    else if (d->index)
        *place_of(m, d->index, d->e, key) = d->n;
}

/* ---- truth and equality */

bool truth(Machine *m, Value v) {
    switch (v.tag) {
    case UNDEFINED:
    case NONE: return false;
    case BOOL:
    case INT: return v.i != 0;
    case FLOAT: return v.d != 0;
    case BIG: return true;
    case STRING: return v.size != 0;
    case LIST: return v.list->kind >= GENERATOR || v.list->n != 0;
    case DICT: return v.dict->n != 0;
    case NAMESPACE:
    case MACRO:
    case FUNCTION:
    case METHOD: return true;
    default: give_up(m, "the truth of a loop");
    }
}

static bool equal_numbers(Machine *m, Value a, Value b) {
    if (is_number(a) && is_number(b)) return a.i == b.i;
    if (a.tag == FLOAT || b.tag == FLOAT) return order(m, a, b) == 0;
    return a.tag == b.tag && !compare_text(a, b); /* the digits of integers beyond 64 bits */
}

static bool equal_lists(Machine *m, const List *a, const List *b, int depth) {
    if (a->kind > TUPLE || b->kind > TUPLE) give_up(m, "a comparison of ranges or views");
    if (a->kind != b->kind || a->n != b->n) return false;
    charge(m, 8 * (size_t)a->n);
    for (uint32_t i = 0; i < a->n; i++)
        if (!equal(m, a->v[i], b->v[i], depth + 1)) return false;
    return true;
}

static bool equal_dicts(Machine *m, const Dict *a, const Dict *b, int depth) {
    if (a->n != b->n) return false;
    for (uint32_t i = 0; i < a->n; i++) {
        if (a->e[i].key.tag != STRING) give_up(m, "a comparison of objects with other keys than strings");
        const Value *other = look_up(m, b, a->e[i].key);
        if (!other || !equal(m, a->e[i].value, *other, depth + 1)) return false;
    }
    return true;
}

bool equal(Machine *m, Value a, Value b, int depth) {
    if (depth > MAX_DEPTH) give_up(m, "values nested too deeply");
    if (a.tag == STRING && b.tag == STRING) {
        if (a.size != b.size) return false;
        charge(m, a.size);
        return !memcmp(a.s, b.s, a.size);
    }
    if (is_numeric(a) && is_numeric(b)) return equal_numbers(m, a, b);
    if (a.tag != b.tag) return false;
    charge(m, 16);
    switch (a.tag) {
    case UNDEFINED:
    case NONE: return true;
    case LIST: return equal_lists(m, a.list, b.list, depth);
    case DICT: return equal_dicts(m, a.dict, b.dict, depth);
    default: give_up(m, "a comparison of objects");
    }
}

int compare_text(Value a, Value b) { /* UTF-8 bytes sort like code points */
    const uint32_t n = a.size < b.size ? a.size : b.size;
    const int found = n ? memcmp(a.s, b.s, n) : 0;
    return found ? found : (a.size > b.size) - (a.size < b.size);
}

bool contains(Machine *m, Value item, Value container) {
    switch (container.tag) {
    case STRING:
        if (item.tag != STRING) give_up(m, "`in` a string");
        charge(m, container.size);
        return find(m, container.s, container.size, item.s, item.size) != NULL;
    case LIST:
        if (container.list->kind >= GENERATOR) give_up(m, "`in` a generator");
        charge(m, 8 * (size_t)container.list->n);
        for (uint32_t i = 0; i < container.list->n; i++)
            if (equal(m, item, container.list->v[i], 0)) return true;
        return false;
    case DICT:
        if (item.tag == STRING) return look_up(m, container.dict, keyed(item)) != NULL;
        if (item.tag == LIST || item.tag == DICT) give_up(m, "an unhashable key");
        for (uint32_t i = 0; i < container.dict->n; i++)
            if (container.dict->e[i].key.tag != STRING) give_up(m, "`in` an object with other keys than strings");
        return false;
    case UNDEFINED: return false;
    default: give_up(m, "`in` another type");
    }
}

Value no_markup(Machine *m, Value v) {
    if (v.tag == STRING && v.markup) give_up(m, "Markup");
    return v;
}
