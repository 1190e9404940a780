"""Quantised linears of all experts in one tensor with a leading axis, from those of each expert (quant_model.py)."""

from tiny_model import SIZES, Tensor

# How the ends of names change with the storage.
HF_FP8 = {".weight": "", ".weight_scale": "_scale_inv", ".input_scale": "_activation_scale"}
FUSED = {".weight": "", ".weight_scale": "_weight_scale", ".weight_scale_2": "_weight_scale_2", ".input_scale": "_input_scale"}


def transposed(t):
    """[rows, columns] -> [columns, rows]; elements are whole bytes."""
    (rows, columns), size = t.shape, int(SIZES[t.dtype])
    at = lambda r, c: t.data[(r * columns + c) * size:(r * columns + c + 1) * size]
    return Tensor(t.dtype, [columns, rows], b"".join(at(r, c) for c in range(columns) for r in range(rows)))


def below(parts):
    """Matrices one below the other."""
    return Tensor(parts[0].dtype, [sum(p.shape[0] for p in parts)] + parts[0].shape[1:], b"".join(p.data for p in parts))


def by_turns(t):
    """Rows 0, n, 1, n + 1 ... of 2n rows."""
    rows = t.shape[0]
    size = len(t.data) // rows
    row = lambda r: t.data[r * size:(r + 1) * size]
    return Tensor(t.dtype, t.shape, b"".join(row(r // 2 + r % 2 * (rows // 2)) for r in range(rows)))


def stack(experts, transpose=False, pairs=False, numbers="each", ends=FUSED, turns=False):
    """experts: per expert the files {end: Tensor} of the linears whose rows lie one below the other (gate and up, or one alone).

    Numbers of whole tensors: "each" [E] (of the first linear; `pairs`: [E, 2]), "column" [E, 1, 1], "all" one for all
    experts, which must agree. turns: the rows of the two linears take turns."""
    out = {}
    for end in experts[0][0]:
        lists = [[files[end] for files in linears] for linears in experts]
        first = lists[0][0]
        elements = len(first.data) // int(SIZES[first.dtype])
        if elements == 1 and len(first.shape) < 2:
            data = [b"".join(t.data for t in (ts if pairs else ts[:1])) for ts in lists]
            if numbers == "all":
                assert len(set(data)) == 1
                tensor = Tensor(first.dtype, [], data[0])
            else:
                shape = [len(lists), 2] if pairs and len(lists[0]) == 2 else [len(lists)] + ([1, 1] if numbers == "column" else [])
                if numbers == "column" and shape[1] == 2:
                    shape.append(1)
                tensor = Tensor(first.dtype, shape, b"".join(data))
        else:
            whole = [below(ts) for ts in lists]
            if turns:
                whole = [by_turns(t) for t in whole]
            if transpose:
                whole = [transposed(t) for t in whole]
            tensor = Tensor(first.dtype, [len(whole)] + whole[0].shape, b"".join(t.data for t in whole))
        out[ends[end]] = tensor
    return out


def fused(files, **kinds):
    """gate_up_proj and down_proj. files: per expert {leaf: {end: Tensor}}."""
    tensors = {"gate_up_proj" + end: t for end, t in stack([[x["gate_proj"], x["up_proj"]] for x in files], **kinds).items()}
    kinds["pairs"] = kinds["turns"] = False
    tensors.update({"down_proj" + end: t for end, t in stack([[x["down_proj"]] for x in files], **kinds).items()})
    return tensors


def split_weights(files, **kinds):
    """Weights of single experts beside numbers of all of them."""
    numbers = {n: t for n, t in fused(files, ends=HF_FP8, **kinds).items() if n.endswith("_scale_inv") or n.endswith("_activation_scale")}
    numbers.update({"%d.%s.weight" % (e, leaf): x[".weight"] for e, expert in enumerate(files) for leaf, x in expert.items()})
    return numbers


def separate(files):
    """gate_proj, up_proj and down_proj, as Step-3 has them."""
    same = {end: end for end in FUSED}
    return {leaf + end: t for leaf in files[0] for end, t in stack([[x[leaf]] for x in files], ends=same).items()}
