"""Numerics: byte layouts, the op table, and every op in plain torch.

`layouts` owns the bytes of a row, `reference` the ops, `ops` the table that names them. Nothing
here knows files, models or threads; any thread may call it.

Shape letters: `T` tokens in this call, `B` sequences, `H` hidden, `E` experts, `K` chosen experts
(or, in a matrix [N, K], the input width), `I` expert inner width, `L` layers, `V` vocabulary, `N`
heads (or matrix rows), `M` key heads, `D` head width, `G` blocks of 32 along K, `S` slots or cached
entries, `R` rows on disk.
"""
