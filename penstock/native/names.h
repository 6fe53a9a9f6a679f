/* Names shared by the compiler and the machine, in the order of `penstock.native.OPS`, `METHODS` and so on. */
#ifndef PENSTOCK_NAMES_H
#define PENSTOCK_NAMES_H

#include "constants.h"

#define METHODS(X)                                                                                                     \
    X(split) X(strip) X(lstrip) X(rstrip) X(startswith) X(endswith) X(replace) X(get) X(items) X(keys) X(values)       \
    X(upper) X(lower) X(capitalize) X(title) X(join) X(find) X(count) X(format) X(removeprefix) X(removesuffix)        \
    X(rsplit) X(splitlines) X(partition) X(rpartition) X(index) X(copy) X(cycle) X(center) X(ljust) X(rjust) X(zfill)  \
    X(expandtabs) X(swapcase) X(casefold) X(rfind) X(rindex) X(isalnum) X(isalpha) X(isascii) X(isdecimal) X(isdigit)  \
    X(isidentifier) X(islower) X(isnumeric) X(isprintable) X(isspace) X(istitle) X(isupper) X(is_integer) X(bit_length)
#define FILTERS(X)                                                                                                     \
    X(trim) X(length) X(count) X(string) X(default) X(d) X(items) X(safe) X(join) X(list) X(dictsort) X(upper)         \
    X(lower) X(capitalize) X(title) X(replace) X(first) X(last) X(int) X(tojson) X(map_attribute) X(map_filter)        \
    X(select) X(reject) X(selectattr) X(rejectattr) X(min) X(max) X(sum) X(unique) X(indent) X(sort) X(groupby)        \
    X(batch) X(slice) X(reverse) X(abs) X(attr) X(float) X(round) X(center) X(e) X(escape) X(forceescape) X(striptags) \
    X(truncate) X(wordcount) X(wordwrap) X(filesizeformat) X(urlencode) X(urlize) X(xmlattr) X(pprint) X(strftime_now)
#define TESTS(X)                                                                                                       \
    X(defined) X(undefined) X(none) X(string) X(mapping) X(iterable) X(sequence) X(boolean) X(true) X(false)           \
    X(number) X(integer) X(float) X(truthy) X(odd) X(even) X(callable) X(escaped) X(lower) X(upper) X(eq) X(ne) X(in)  \
    X(lt) X(le) X(gt) X(ge) X(divisibleby) X(sameas)
/* Every operation with its operands, and how many values it pops and pushes, where a[i] is an operand. Operands:
 * c constant, s text, w text that is not empty, k list of as many texts as the operand before says, g global, l local,
 * j jump target, b branch, n count, p positive count, i any integer, m method, f filter, t test, x macro that is defined
 * here, u STARRED_… flags. Where an operation can jump, the figures are those of going to the next one. `verify.c` checks
 * all of it. */
#define OPS(X)                                                                                                         \
    X(CONST, "c", 0, 1) X(LOAD_GLOBAL, "g", 0, 1) X(LOAD_LOCAL, "l", 0, 1) X(STORE_GLOBAL, "g", 1, 0)                  \
    X(STORE_LOCAL, "l", 1, 0) X(CLEAR_GLOBAL, "g", 0, 0) X(CLEAR_LOCAL, "l", 0, 0) X(MESSAGES, "", 0, 1)               \
    X(TOOLS, "", 0, 1) X(VARIABLE, "sc", 0, 1) X(PRINT_CONST, "s", 0, 0) X(PRINT, "", 1, 0) X(PRINT_SUM, "p", a[0], 0) \
    X(PRINT_CONCAT, "n", a[0], 0) X(PRINT_JSON, "n", 1 + a[0], 0) X(SUM, "p", a[0], 1) X(CONCAT, "n", a[0], 1)         \
    X(ATTRIBUTE, "sn", 1, 1) X(KEY, "sn", 1, 1) X(ITEM, "", 2, 1) X(INDEX, "i", 1, 1) X(SLICE, "", 4, 1)               \
    X(METHOD, "mn", 1 + a[1], 1) X(CALL, "nnku", CALL_SIZE, 1) X(CALL_PRINT, "nnku", CALL_SIZE, 0)                     \
    X(CALL_BLOCK, "nnku", CALL_SIZE, 0) X(MACRO, "x", 0, 1) X(LOAD_OUTER, "pn", 0, 1) X(LOAD_ARGUMENT, "l", 0, 1)      \
    X(IN_SCOPE, "", 1, 1) X(FILTER, "fpn", a[1], 1) X(TEST, "tn", 1 + a[1], 1) X(NOT, "", 1, 1) X(JUMP, "j", 0, 0)     \
    X(JUMP_FALSE, "jb", 1, 0) X(JUMP_TRUE, "jb", 1, 0) X(JUMP_FALSE_KEEP, "jb", 1, 0) X(JUMP_TRUE_KEEP, "jb", 1, 0)    \
    X(POP, "", 1, 0) X(EQ, "", 2, 1) X(NE, "", 2, 1) X(LT, "", 2, 1) X(LE, "", 2, 1) X(GT, "", 2, 1) X(GE, "", 2, 1)   \
    X(IN, "", 2, 1) X(NOT_IN, "", 2, 1) X(EQ_TEXT, "s", 1, 1) X(NE_TEXT, "s", 1, 1) X(TEXT_IN, "s", 1, 1)              \
    X(LOOP_BEGIN, "", 1, 0) X(LOOP_NEXT, "j", 0, 1) X(LOOP_END, "", 0, 0) X(LOOP_TAKE, "j", 0, 1)                      \
    X(LOOP_ACCEPT, "", 0, 0) X(LOOP_DONE, "", 0, 0) X(LOOP_ELSE, "", 0, 1) X(LOOP_RECURSIVE, "", 0, 0)                 \
    X(FILTER_BEGIN, "", 0, 0) X(FILTER_KEEP, "", 1, 0) X(FILTER_END, "", 0, 1) X(LOOP_GLOBAL, "g", 0, 0)               \
    X(LOOP_LOCAL, "l", 0, 0) X(UNPACK, "n", 1, a[0]) X(LIST, "n", a[0], 1) X(TUPLE, "n", a[0], 1)                      \
    X(DICT, "n", 2 * a[0], 1) X(NAMESPACE, "nu", 2 * a[0] + SPREADS(a[1]), 1) X(SET_ATTRIBUTE, "s", 2, 0)              \
    X(CAPTURE, "", 0, 0) X(PRINT_BLOCK, "", 1, 0) X(CAPTURE_END, "", 0, 1) X(GENERATION, "", 0, 0)                     \
    X(GENERATION_END, "", 0, 0) X(RETURN, "", 0, 0) X(SUBTRACT, "", 2, 1) X(MULTIPLY, "", 2, 1) X(MODULO, "", 2, 1)    \
    X(NEGATE, "", 1, 1) X(FLOOR_DIVIDE, "", 2, 1) X(DIVIDE, "", 2, 1) X(POWER, "", 2, 1) X(CHAIN, "njb", 2, 1)         \
    X(RANGE, "p", a[0], 1) X(REFUSE, "", 1, 1) X(GIVE_UP, "s", 0, 0)                                                   \
    X(ARGUMENT, "ljb", 0, 0) X(SPLIT_AT, "wn", 1, 1) X(HALT, "", 0, 0)

/* Values of a call: the callee, positional arguments, a list of more, named arguments, an object of more. */
#define SPREADS(flags) (((flags) & STARRED_LIST) + ((flags) & STARRED_DICT) / STARRED_DICT)
#define CALL_SIZE (1 + a[0] + a[1] + SPREADS(a[3]))

#define ENUM_METHOD(x) METHOD_##x,
#define ENUM_FILTER(x) FILTER_##x,
#define ENUM_TEST(x) TEST_##x,
#define ENUM_OP(x, operands, pops, pushes) OP_##x,
enum { METHODS(ENUM_METHOD) METHOD_COUNT };
enum { FILTERS(ENUM_FILTER) FILTER_COUNT };
enum { TESTS(ENUM_TEST) TEST_COUNT };
enum { OPS(ENUM_OP) OP_COUNT };

#endif
