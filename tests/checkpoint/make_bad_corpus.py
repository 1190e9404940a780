#!/usr/bin/env python3
"""Malformed safetensors files and shard folders, with the refusal that each must get."""

from corpus import container, entry, header, main, simple_file

MAX_U64 = 2**64 - 1
CORRUPT, LIMIT, MISSING, NOT_FOUND = "corrupt_file", "limit_exceeded", "missing_tensor", "not_found"


def lengths(c):
    """The 8 length bytes and the size of the file."""
    c.file("empty_file", b"", CORRUPT, ["header too small", "got 0 bytes"])
    c.file("seven_bytes", b"\x02\0\0\0\0\0\0", CORRUPT, ["header too small", "got 7 bytes"])
    c.file("length_only_zero", container(""), CORRUPT, ["not valid JSON", "no bytes"])
    c.file("length_zero_with_data", container("", b"{}"), CORRUPT, ["not valid JSON"])
    c.file("length_all_ones", container("{}", length=MAX_U64), LIMIT, ["header too large", str(MAX_U64)])
    c.file("length_wraps_to_header", container("{}", length=MAX_U64 - 7), LIMIT, "header too large")
    c.file("length_sign_bit", container("{}", length=1 << 63), LIMIT, "header too large")
    c.file("length_above_cap", container("{}", length=100_000_001), LIMIT, ["header too large", "100000000"])
    c.file("length_at_cap_but_short_file", container("{}", length=100_000_000), CORRUPT, "invalid header length")
    c.file("length_beyond_file", container("{}", b" " * 10, length=100), CORRUPT, ["invalid header length", "got 100", "at most 12"])
    c.file("length_one_more", container("{}", length=3), CORRUPT, "invalid header length")
    c.file("length_one_less", container('{"a":' + entry() + "}", b"\1", length=len('{"a":' + entry() + "}") - 1), CORRUPT, "not valid JSON")
    c.file("length_big_endian", b"\0\0\0\0\0\0\0\2{}", LIMIT, "header too large")


def text(c):
    """UTF-8 and JSON syntax."""
    c.file("one_brace", container("{"), CORRUPT, "not valid JSON")
    c.file("one_byte_ff", container(b"\xff"), CORRUPT, "not UTF-8")
    c.file("utf8_bad_lead", container(b'{"\xfe":1}'), CORRUPT, ["not UTF-8", "0xfe", "position 2"])
    c.file("utf8_lone_continuation", container(b'{"\x80":1}'), CORRUPT, "not UTF-8")
    c.file("utf8_overlong", container(b'{"\xc0\xaf":1}'), CORRUPT, "not UTF-8")
    c.file("utf8_overlong_three", container(b'{"\xe0\x80\xaf":1}'), CORRUPT, "not UTF-8")
    c.file("utf8_surrogate", container(b'{"\xed\xa0\x80":1}'), CORRUPT, "not UTF-8")
    c.file("utf8_above_unicode", container(b'{"\xf4\x90\x80\x80":1}'), CORRUPT, "not UTF-8")
    c.file("utf8_cut_sequence", container(b'{"a\xe2\x82'), CORRUPT, "not UTF-8")
    c.file("utf16", container("{}".encode("utf-16-le")), CORRUPT, "not valid JSON")
    c.file("byte_order_mark", container(b"\xef\xbb\xbf{}"), CORRUPT, ["not valid JSON", "first byte"])
    c.file("leading_space", container(" {}"), CORRUPT, ["not valid JSON", "first byte"])
    c.file("leading_newline", container("\n{}"), CORRUPT, "first byte")
    c.file("padding_newline", container("{}\n"), CORRUPT, "spaces only")
    c.file("padding_tab", container("{}  \t "), CORRUPT, "spaces only")
    c.file("padding_nul", container(b"{}\0\0\0\0\0\0"), CORRUPT, "spaces only")
    c.file("nul_inside", container(b'{\0}'), CORRUPT, ["not valid JSON", "NUL"])
    c.file("nul_then_brace", container(b"{}\0{}"), CORRUPT, "NUL")
    c.file("two_objects", container("{}{}"), CORRUPT, "not valid JSON")
    c.file("object_then_text", container("{}x"), CORRUPT, "spaces only")
    c.file("root_array", container("[]"), CORRUPT, "first byte")
    c.file("root_string", container('"a"'), CORRUPT, "first byte")
    c.file("root_number", container("1"), CORRUPT, "first byte")
    c.file("unclosed", container('{"a":' + entry(), b"\1"), CORRUPT, "not valid JSON")
    c.file("single_quotes", container("{'a':1}"), CORRUPT, "not valid JSON")
    c.file("trailing_comma", container('{"a":' + entry() + ",}", b"\1"), CORRUPT, "not valid JSON")
    c.file("missing_colon", container('{"a" ' + entry() + "}", b"\1"), CORRUPT, "not valid JSON")
    c.file("comment", container('{/* */"a":' + entry() + "}", b"\1"), CORRUPT, "not valid JSON")
    c.file("bad_escape", container('{"\\q":' + entry() + "}", b"\1"), CORRUPT, "not valid JSON")
    c.file("lone_surrogate_escape", container('{"\\ud800":' + entry() + "}", b"\1"), CORRUPT, "not valid JSON")
    c.file("raw_control_in_name", container('{"a\nb":' + entry() + "}", b"\1"), CORRUPT, "not valid JSON")
    c.file("nan_literal", container(header(a=entry(shape="[NaN]")), b"\1"), CORRUPT, "not valid JSON")
    c.file("leading_zero", container(header(a=entry(shape="[01]")), b"\1"), CORRUPT, "not valid JSON")
    c.file("plus_sign", container(header(a=entry(shape="[+1]")), b"\1"), CORRUPT, "not valid JSON")
    c.file("hex_number", container(header(a=entry(shape="[0x1]")), b"\1"), CORRUPT, "not valid JSON")
    c.file("nesting_nine", container('{"a":' + entry(extra=',"x":' + "[" * 7 + "]" * 7) + "}", b"\1"), LIMIT, ["nesting", "at most 8"])
    c.file("nesting_million", container('{"a":{"x":' + "[" * 1_000_000), CORRUPT, [])
    c.file("nesting_million_closed", container('{"a":{"x":' + "[" * 1_000_000 + "]" * 1_000_000 + "}}"), LIMIT, "nesting")


def entries(c):
    """Types and fields of one tensor's entry."""
    good = entry()
    for name, value in {"null": "null", "bool": "true", "number": "1", "negative": "-1", "float": "1.5", "string": '"x"', "array": "[]"}.items():
        c.file("entry_is_" + name, container('{"a":%s}' % value), CORRUPT, ['tensor "a"', "need an object"])
    c.file("entry_empty", container('{"a":{}}'), CORRUPT, ['tensor "a"', "dtype is missing"])
    c.file("no_dtype", container('{"a":{"shape":[1],"data_offsets":[0,1]}}', b"\1"), CORRUPT, "dtype is missing")
    c.file("no_shape", container('{"a":{"dtype":"U8","data_offsets":[0,1]}}', b"\1"), CORRUPT, "shape is missing")
    c.file("no_offsets", container('{"a":{"dtype":"U8","shape":[1]}}', b"\1"), CORRUPT, "data_offsets is missing")
    for name, dtype in {"lowercase": "f32", "unknown": "F31", "empty": "", "torch": "torch.float32", "space": "F32 ", "alias": "BFLOAT16"}.items():
        c.file("dtype_" + name, container(header(a=entry(dtype=dtype, offsets=(0, 4))), bytes(4)), CORRUPT, ['tensor "a"', "dtype", '"%s"' % dtype])
    c.file("dtype_number", container('{"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}}', b"\1"), CORRUPT, ["dtype", "got 7", "need a string"])
    c.file("dtype_null", container('{"a":{"dtype":null,"shape":[1],"data_offsets":[0,1]}}', b"\1"), CORRUPT, ["dtype", "null"])
    c.file("dtype_array", container('{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}', b"\1"), CORRUPT, ["dtype", "an array"])
    for field in ("shape", "offsets"):
        label = {"shape": "shape", "offsets": "data_offsets"}[field]
        for name, value in {"number": "1", "string": '"1"', "object": "{}", "null": "null", "strings": '["0","1"]', "nested": "[[0],[1]]", "bools": "[false,true]", "nulls": "[null,1]"}.items():
            c.file("%s_%s" % (field, name), container(header(a=entry(**{field: value})), b"\1"), CORRUPT, ['tensor "a"', label + ": got"])
        for name, value in {"negative": "-1", "minus_zero": "-0", "fraction": "1.5", "float_integer": "1.0", "exponent": "1e0", "two_to_64": str(2**64), "digits": "9" * 400}.items():
            pair = "[0,%s]" % value
            c.file("%s_%s" % (field, name), container(header(a=entry(**{field: pair})), b"\1"), CORRUPT, ['tensor "a"', label + ": got"] if name != "digits" else [])
    c.file("offsets_none", container(header(a=entry(offsets="[]")), b"\1"), CORRUPT, ["data_offsets: got 0 numbers", "exactly 2"])
    c.file("offsets_one", container(header(a=entry(offsets="[0]")), b"\1"), CORRUPT, "data_offsets: got 1 numbers")
    c.file("offsets_three", container(header(a=entry(offsets="[0,1,1]")), b"\1"), CORRUPT, "more than 2")
    c.file("name_empty", container('{"":%s}' % good, b"\1"), CORRUPT, ["tensor name", "empty"])
    c.file("name_nul", container('{"a\\u0000b":%s}' % good, b"\1"), CORRUPT, ["tensor name", "NUL"])


def duplicates(c):
    a, b = entry(), entry(offsets=(1, 2))
    c.file("duplicate_tensor", container('{"a":%s,"a":%s}' % (a, b), b"\1\2"), CORRUPT, 'duplicate key "a"')
    c.file("duplicate_tensor_same_bytes", container('{"a":%s,"a":%s}' % (a, a), b"\1"), CORRUPT, 'duplicate key "a"')
    c.file("duplicate_tensor_escaped", container('{"a":%s,"\\u0061":%s}' % (a, b), b"\1\2"), CORRUPT, 'duplicate key "a"')
    c.file("duplicate_empty_tensors", container('{"e":%s,"e":%s}' % ((entry(shape=[0], offsets=(0, 0)),) * 2)), CORRUPT, 'duplicate key "e"')
    c.file("duplicate_dtype", container('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\1"), CORRUPT, 'duplicate key "dtype"')
    c.file("duplicate_shape", container('{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"\1"), CORRUPT, 'duplicate key "shape"')
    c.file("duplicate_offsets", container(header(a=entry(extra=',"data_offsets":[0,1]')), b"\1"), CORRUPT, 'duplicate key "data_offsets"')
    c.file("duplicate_unknown", container(header(a=entry(extra=',"x":1,"x":2')), b"\1"), CORRUPT, ['tensor "a"', 'duplicate key "x"'])
    c.file("duplicate_unknown_nested", container(header(a=entry(extra=',"x":{"y":1,"y":1}')), b"\1"), CORRUPT, 'duplicate key "y"')
    many = "".join(',"k%d":0' % i for i in range(65))
    c.file("too_many_unknown_keys", container(header(a=entry(extra=many)), b"\1"), LIMIT, "at most 64")


def metadata(c):
    for name, value in {"null": "null", "array": "[]", "string": '"pt"', "number": "1"}.items():
        c.file("metadata_" + name, container('{"__metadata__":%s}' % value), CORRUPT, ["__metadata__", "need an object"])
    for name, value in {"number": "1", "null": "null", "bool": "true", "float": "1.5", "negative": "-3", "array": '["pt"]', "object": "{}"}.items():
        c.file("metadata_value_" + name, container('{"__metadata__":{"format":%s}}' % value), CORRUPT, ["__metadata__", '"format"', "need a string"])
    c.file("metadata_twice", container('{"__metadata__":{},"__metadata__":{}}'), CORRUPT, 'duplicate key "__metadata__"')
    c.file("metadata_duplicate_key", container('{"__metadata__":{"a":"1","a":"1"}}'), CORRUPT, ["__metadata__", 'duplicate key "a"'])
    many = ",".join('"%x":""' % i for i in range(65537))
    c.file("metadata_too_many", container('{"__metadata__":{%s}}' % many), LIMIT, ["__metadata__", "65536"])


def sizes(c):
    """Shapes against offsets against the file."""
    i32 = lambda shape, offsets=(0, 16): header(test=entry("I32", shape, offsets))
    c.file("trailing_byte", container(i32([2, 2]), bytes(17)), CORRUPT, ["incomplete buffer", "got 17", "need 16", "trailing"])
    c.file("truncated_data", container(i32([2, 2]), bytes(14)), CORRUPT, ["incomplete buffer", "got 14", "truncated"])
    c.file("no_data", container(i32([2, 2])), CORRUPT, "incomplete buffer")
    c.file("empty_header_with_data", container("{}", b"\1"), CORRUPT, ["incomplete buffer", "trailing"])
    c.file("offsets_too_short", container(i32([2, 2], (0, 4)), bytes(4)), CORRUPT, ["data_offsets: got [0, 4]", "need 16"])
    c.file("offsets_too_long", container(i32([2, 2], (0, 20)), bytes(20)), CORRUPT, "need 16")
    c.file("offsets_reversed", container(i32([1], (4, 0)), bytes(4)), CORRUPT, ["data_offsets: got [4, 0]", "begin <= end"])
    c.file("scalar_without_bytes", container(i32([], (0, 0))), CORRUPT, "need 4")
    c.file("zero_dim_with_bytes", container(i32([2, 0], (0, 4)), bytes(4)), CORRUPT, "need 0")
    c.file("shape_overflow", container(i32("[2,18446744073709551614]"), bytes(16)), LIMIT, ["shape", "overflow", "number"])
    c.file("shape_overflow_before_zero", container(i32("[9223372036854775808,2,0]", (0, 0))), LIMIT, "overflow")
    c.file("bits_overflow", container(i32("[4611686018427387904,1]"), bytes(16)), LIMIT, ["overflow", "bits"])
    c.file("wraps_to_zero_bytes", container(i32("[4294967296,4294967296]", (0, 0))), LIMIT, "overflow")
    c.file("wraps_to_right_size", container(i32("[4611686018427387905,4]"), bytes(16)), LIMIT, "overflow")
    c.file("dimension_above_int64", container(header(a=entry("U8", "[0,9223372036854775808]", (0, 0)))), LIMIT, "2^63-1")
    c.file("offset_near_2_64", container(header(a=entry("U8", [1], "[18446744073709551614,18446744073709551615]")), b"\1"), CORRUPT, ["data_offsets", "hole"])
    c.file("double_rounding_of_offset", container(header(a=entry("U8", "[9007199254740993]", "[0,9007199254740992]"))), CORRUPT, ["9007199254740993", "9007199254740992"])
    c.file("huge_claim", container(header(a=entry("F32", "[1000000000000]", "[0,4000000000000]")), bytes(4)), CORRUPT, ["incomplete buffer", "4000000000000"])
    c.file("f4_odd", container(header(a=entry("F4", [3], (0, 2))), bytes(2)), CORRUPT, "misaligned")
    c.file("f6_odd", container(header(a=entry("F6_E2M3", [3], (0, 3))), bytes(3)), CORRUPT, "misaligned")
    c.file("f6_e3m2_scalar", container(header(a=entry("F6_E3M2", [], (0, 1))), bytes(1)), CORRUPT, "misaligned")
    c.file("first_begin_not_zero", container(header(a=entry("U8", [4], (1, 5))), bytes(5)), CORRUPT, ["need begin 0", "hole of 1 bytes"])
    four = lambda b, e: entry("U8", [e - b], (b, e))
    c.file("hole", container(header(a=four(0, 4), b=four(5, 9)), bytes(9)), CORRUPT, ['tensor "b"', "[5, 9]", "need begin 4", "hole"])
    c.file("overlap", container(header(a=four(0, 4), b=four(2, 6)), bytes(6)), CORRUPT, ['tensor "b"', "overlaps", '"a"'])
    c.file("alias", container(header(a=four(0, 4), b=four(0, 4)), bytes(4)), CORRUPT, ['tensor "b"', "overlaps"])
    c.file("contained", container(header(a=four(0, 8), b=four(2, 4)), bytes(8)), CORRUPT, "overlaps")
    c.file("empty_inside_another", container(header(a=four(0, 4), e=entry("U8", [0], (2, 2))), bytes(4)), CORRUPT, ['tensor "e"', "overlaps"])
    c.file("empty_beyond_end", container(header(a=four(0, 4), e=entry("U8", [0], (9, 9))), bytes(4)), CORRUPT, ['tensor "e"', "hole"])
    c.file("hole_listed_backwards", container(header(b=four(5, 9), a=four(0, 4)), bytes(9)), CORRUPT, ['tensor "b"', "hole"])
    c.file("long_name_is_cut_in_the_message", container(header(**{"n" * 100_000: entry(offsets=(0, 2))}), b"\1\2"), CORRUPT, ["(100000 bytes)", "need 1"])
    c.file("control_characters_are_escaped", container('{"\\u001b[2J":%s}' % entry(offsets=(0, 2)), b"\1\2"), CORRUPT, "\\x1b[2J")


def index(c):
    """Shard folders."""
    shard = simple_file("a", "b")
    one = "model-00001-of-00001.safetensors"
    idx = "model.safetensors.index.json"
    bad = lambda name, text, code, words: c.folder(name, {idx: text, one: shard}, code, words)
    mapped = lambda file: '{"metadata":{"total_size":2},"weight_map":{"a":"%s","b":"%s"}}' % (one, file)
    for name, file, why in [
        ("parent", "../x.safetensors", "'/'"), ("parent_alone", "..", "'..'"), ("dots", "a..safetensors", "'..'"), ("absolute", "/etc/x.safetensors", "'/'"),
        ("subfolder", "sub/x.safetensors", "'/'"), ("backslash", "..\\\\x.safetensors", "'\\'"), ("drive", "C:x.safetensors", "drive"),
        ("nul", "x\\u0000.safetensors", "control"), ("newline", "x\\n.safetensors", "control"), ("empty", "", "is empty"), ("dot", ".", ".safetensors"),
        ("extension", "pytorch_model.bin", ".safetensors"), ("only_extension", ".safetensors", "does not end"),
    ]:
        bad("index_file_" + name, mapped(file), CORRUPT, ["weight_map", 'tensor "b"', why])
    bad("index_empty", "", CORRUPT, "not valid JSON")
    bad("index_array", "[]", CORRUPT, "need an object")
    bad("index_no_map", '{"metadata":{}}', CORRUPT, "weight_map is missing")
    bad("index_map_empty", '{"weight_map":{}}', CORRUPT, "at least one")
    bad("index_map_array", '{"weight_map":[]}', CORRUPT, "weight_map: got an array")
    bad("index_map_null", '{"weight_map":null}', CORRUPT, "weight_map: got null")
    bad("index_file_number", '{"weight_map":{"a":1}}', CORRUPT, ['tensor "a"', "need a file name"])
    bad("index_file_object", '{"weight_map":{"a":{}}}', CORRUPT, "need a file name")
    bad("index_file_null", '{"weight_map":{"a":null}}', CORRUPT, "need a file name")
    bad("index_tensor_empty", '{"weight_map":{"":"%s"}}' % one, CORRUPT, "empty tensor name")
    bad("index_duplicate_tensor", '{"weight_map":{"a":"%s","a":"%s"}}' % (one, one), CORRUPT, 'duplicate key "a"')
    bad("index_duplicate_map", '{"weight_map":{"a":"%s"},"weight_map":{"b":"%s"}}' % (one, one), CORRUPT, 'duplicate key "weight_map"')
    bad("index_duplicate_size", '{"metadata":{"total_size":2,"total_size":2},"weight_map":{"a":"%s"}}' % one, CORRUPT, 'duplicate key "total_size"')
    bad("index_metadata_array", '{"metadata":[],"weight_map":{"a":"%s"}}' % one, CORRUPT, "metadata: got an array")
    bad("index_size_string", '{"metadata":{"total_size":"2"},"weight_map":{"a":"%s"}}' % one, CORRUPT, 'total_size: got string "2"')
    bad("index_size_negative", '{"metadata":{"total_size":-2},"weight_map":{"a":"%s"}}' % one, CORRUPT, "total_size: got -2")
    bad("index_deep", '{"x":' + "[" * 100 + "]" * 100 + ',"weight_map":{"a":"%s"}}' % one, LIMIT, "nesting")
    bad("index_trailing", mapped(one) + "x", CORRUPT, "not valid JSON")
    bad("index_bom", "\ufeff" + mapped(one), CORRUPT, "byte order mark")
    bad("index_nul", mapped(one) + "\0", CORRUPT, "NUL")
    c.folder("index_not_utf8", {idx: b'{"weight_map":{"\xff":"x"}}', one: shard}, CORRUPT, "not UTF-8")
    bad("index_tensor_not_in_file", '{"weight_map":{"zzz":"%s"}}' % one, MISSING, ['"zzz"', one])
    bad("index_file_absent", mapped("model-00002-of-00002.safetensors"), NOT_FOUND, "model-00002-of-00002")
    c.folder("index_shard_corrupt", {idx: mapped(one), one: shard[:-1]}, CORRUPT, ["incomplete buffer", one])
    c.folder("no_safetensors", {"config.json": "{}"}, NOT_FOUND, "no safetensors")
    c.folder("no_index_duplicate", {"model-00001-of-00002.safetensors": simple_file("a", "b"), "model-00002-of-00002.safetensors": simple_file("b")}, CORRUPT, ['"b"', "two files"])
    c.folder("no_index_consolidated_duplicate", {"model.safetensors": simple_file("a"), "model-00001-of-00001.safetensors": simple_file("a")}, CORRUPT, ['"a"', "two files"])
    c.folder("no_index_missing_shard", {"model-00001-of-00003.safetensors": simple_file("a"), "model-00003-of-00003.safetensors": simple_file("b")}, NOT_FOUND, "shard 2 of 3")


def good(c):
    """What must not be refused: the corpus would be worthless against a reader that refuses everything."""
    i32 = lambda shape, offsets: header(test=entry("I32", shape, offsets))
    c.file("ok_empty", container("{}"), "ok")
    c.file("ok_empty_padded", container("{}      "), "ok")
    c.file("ok_odd_length", container("{} "), "ok")
    c.file("ok_scalar", container(i32([], (0, 4)), bytes(4)), "ok")
    c.file("ok_zero_dim", container(i32([2, 0], (0, 0))), "ok")
    c.file("ok_f6", container(header(a=entry("F6_E2M3", [4], (0, 3))), bytes(3)), "ok")
    c.file("ok_rank_six", container(header(a=entry("U8", [1, 1, 1, 1, 1, 2], (0, 2))), bytes(2)), "ok")
    c.file("ok_any_order", container(header(b=entry("U8", [4], (4, 8)), a=entry("U8", [4], (0, 4))), bytes(8)), "ok")
    c.file("ok_unknown_keys", container(header(a=entry(extra=',"x":{"y":[1,2.5,null,{"z":-1}]},"w":"v"')), b"\1"), "ok")
    c.file("ok_nesting_eight", container('{"a":' + entry(extra=',"x":' + "[" * 6 + "]" * 6) + "}", b"\1"), "ok")
    c.file("ok_inner_spaces", container('{ "a"\n:\t' + entry() + "\r\n}", b"\1"), "ok")
    c.file("ok_metadata", container('{"__metadata__":{"format":"pt","":""},"a":%s}' % entry(), b"\1"), "ok")
    c.file("ok_unicode_name", container('{"\u00e9\\u00e8\U0001f600":%s}' % entry(), b"\1"), "ok")
    one, two, idx = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    c.folder("ok_single", {"model.safetensors": simple_file("a")}, "ok")
    c.folder("ok_sharded_without_index", {one: simple_file("a"), two: simple_file("b")}, "ok")
    c.folder("ok_index", {one: simple_file("a"), two: simple_file("b", "a"), idx: '{"metadata":{"total_size":2.0,"note":[{"x":null}]},"weight_map":{"a":"%s","b":"%s"},"other":1}' % (one, two), "consolidated.safetensors": b"junk"}, "ok")


def fill(c):
    for part in (lengths, text, entries, duplicates, metadata, sizes, index, good):
        part(c)


main(fill)
