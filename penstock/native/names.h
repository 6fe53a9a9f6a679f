/* Names shared by the compiler and the machine, in the order of `penstock.native.OPS`, `METHODS` and so on. */
#ifndef PENSTOCK_NAMES_H
#define PENSTOCK_NAMES_H

#define METHODS(X)                                                                                                     \
    X(split) X(strip) X(lstrip) X(rstrip) X(startswith) X(endswith) X(replace) X(get) X(items) X(keys) X(values)       \
    X(upper) X(lower) X(capitalize) X(join) X(find) X(count) X(format) X(removeprefix) X(removesuffix)
#define FILTERS(X)                                                                                                     \
    X(trim) X(length) X(count) X(string) X(default) X(d) X(items) X(safe) X(join) X(list) X(dictsort) X(upper)         \
    X(lower) X(capitalize) X(replace) X(first) X(last) X(int) X(tojson) X(map_attribute) X(map_filter) X(select)       \
    X(reject) X(selectattr) X(rejectattr) X(min) X(max) X(unique) X(indent) X(sort) X(reverse)
#define TESTS(X)                                                                                                       \
    X(defined) X(undefined) X(none) X(string) X(mapping) X(iterable) X(sequence) X(boolean) X(true) X(false)           \
    X(number) X(integer) X(float) X(truthy) X(odd) X(even) X(eq) X(ne) X(in) X(lt) X(gt)
/* Every operation with its operands: c constant, s text, k list of texts, g global, l local, j jump target, b branch,
 * n count, i any integer, m method, f filter, t test. The loader checks them. */
#define OPS(X)                                                                                                         \
    X(CONST, "c") X(LOAD_GLOBAL, "g") X(LOAD_LOCAL, "l") X(STORE_GLOBAL, "g") X(STORE_LOCAL, "l") X(CLEAR_GLOBAL, "g") \
    X(CLEAR_LOCAL, "l") X(MESSAGES, "") X(TOOLS, "") X(VARIABLE, "sc") X(PRINT_CONST, "s") X(PRINT, "")                \
    X(PRINT_SUM, "n") X(PRINT_CONCAT, "n") X(PRINT_JSON, "n") X(SUM, "n") X(CONCAT, "n") X(ATTRIBUTE, "sn")            \
    X(KEY, "sn") X(ITEM, "") X(INDEX, "i") X(SLICE, "") X(METHOD, "mn") X(CALL, "nnk") X(CALL_PRINT, "nnk")            \
    X(FILTER, "fnn") X(TEST, "tn") X(NOT, "") X(JUMP, "j") X(JUMP_FALSE, "jb") X(JUMP_TRUE, "jb")                      \
    X(JUMP_FALSE_KEEP, "jb") X(JUMP_TRUE_KEEP, "jb") X(POP, "") X(EQ, "") X(NE, "") X(LT, "") X(LE, "") X(GT, "")      \
    X(GE, "") X(IN, "") X(NOT_IN, "") X(EQ_TEXT, "s") X(NE_TEXT, "s") X(TEXT_IN, "s") X(LOOP_BEGIN, "")                \
    X(LOOP_NEXT, "j") X(LOOP_END, "") X(FILTER_BEGIN, "") X(FILTER_KEEP, "") X(FILTER_END, "") X(LOOP_GLOBAL, "g")     \
    X(LOOP_LOCAL, "l") X(UNPACK, "n") X(LIST, "n") X(TUPLE, "n") X(DICT, "n") X(NAMESPACE, "n")                        \
    X(SET_ATTRIBUTE, "s") X(CAPTURE, "") X(PRINT_BLOCK, "")                                                            \
    X(CAPTURE_END, "") X(GENERATION, "") X(GENERATION_END, "") X(RETURN, "") X(SUBTRACT, "") X(MULTIPLY, "")           \
    X(MODULO, "") X(NEGATE, "") X(FLOOR_DIVIDE, "") X(RANGE, "n") X(REFUSE, "") X(GIVE_UP, "s") X(ARGUMENT, "ljb")     \
    X(SPLIT_AT, "sn") X(HALT, "")

#define ENUM_METHOD(x) METHOD_##x,
#define ENUM_FILTER(x) FILTER_##x,
#define ENUM_TEST(x) TEST_##x,
#define ENUM_OP(x, operands) OP_##x,
enum { METHODS(ENUM_METHOD) METHOD_COUNT };
enum { FILTERS(ENUM_FILTER) FILTER_COUNT };
enum { TESTS(ENUM_TEST) TEST_COUNT };
enum { OPS(ENUM_OP) OP_COUNT };

#endif
