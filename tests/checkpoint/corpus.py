"""Shared by the generators of malformed checkpoints (make_bad_*.py).

A generator is run as `python3 make_bad_X.py FOLDER`, writes its cases below FOLDER and a FOLDER/manifest.json:
a list of {"name", "path" (relative), "open", "code", "keywords"}. "open" says which door to knock at:
"tensor_file" (TensorFile::open on a file), "shards" (the shard set of a folder), "checkpoint"
(Checkpoint::open on a folder or a GGUF file) or "layer" (its first MoE layer is loaded, with all experts). "code" is a status code name such as "corrupt_file", or "ok" for a case that
must load. Every keyword must occur in the message.
"""

import json
import os
import struct
import sys


def container(header, data=b"", length=None):
    """A safetensors file from header text or bytes; `length` overrides the length field."""
    if isinstance(header, str):
        header = header.encode("utf-8")
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype="U8", shape=(1,), offsets=(0, 1), extra=""):
    """One tensor entry as JSON text; shape and offsets may be raw text."""
    shape = shape if isinstance(shape, str) else json.dumps(list(shape))
    offsets = offsets if isinstance(offsets, str) else json.dumps(list(offsets))
    return '{"dtype":"%s","shape":%s,"data_offsets":%s%s}' % (dtype, shape, offsets, extra)


def header(**tensors):
    return "{" + ",".join('"%s":%s' % item for item in tensors.items()) + "}"


def simple_file(*names):
    """A good file: one U8 tensor of one byte per name."""
    body = ",".join('"%s":%s' % (n, entry(offsets=(i, i + 1))) for i, n in enumerate(names))
    return container("{" + body + "}", bytes(range(1, len(names) + 1)))


class Corpus:
    def __init__(self, root):
        self.root = root
        self.cases = []

    def _add(self, name, path, door, code, keywords):
        assert all(c["name"] != name for c in self.cases), name
        keywords = [keywords] if isinstance(keywords, str) else list(keywords)
        self.cases.append({"name": name, "path": path, "open": door, "code": code, "keywords": keywords})

    def file(self, name, content, code, keywords=()):
        """One safetensors file, opened alone."""
        path = name + ".safetensors"
        with open(os.path.join(self.root, path), "wb") as f:
            f.write(content)
        self._add(name, path, "tensor_file", code, keywords)

    def gguf(self, name, content, code, keywords=(), door="checkpoint"):
        path = name + ".gguf"
        with open(os.path.join(self.root, path), "wb") as f:
            f.write(content)
        self._add(name, path, door, code, keywords)

    def folder(self, name, files, code, keywords=(), door="shards"):
        """A folder of files (name -> bytes or text)."""
        os.makedirs(os.path.join(self.root, name))
        for file_name, content in files.items():
            with open(os.path.join(self.root, name, file_name), "wb") as f:
                f.write(content.encode("utf-8") if isinstance(content, str) else content)
        self._add(name, name, door, code, keywords)

    def finish(self):
        with open(os.path.join(self.root, "manifest.json"), "w", encoding="utf-8") as f:
            json.dump(self.cases, f, indent=1)
        print("%d cases" % len(self.cases))


def main(fill):
    if len(sys.argv) != 2:
        sys.exit("usage: %s FOLDER" % sys.argv[0])
    os.makedirs(sys.argv[1], exist_ok=True)
    corpus = Corpus(sys.argv[1])
    fill(corpus)
    corpus.finish()
