"""The absolute tolerances of the whole suite; never relaxed inside a test."""

FLOAT32 = 1e-5
"""float32 with matmul precision "highest" against float64."""
BFLOAT16 = 2e-2
CACHED = 1e-4
"""Logits of cached decoding against the full forward pass: the sums run in another order."""
INT8 = 3e-2
"""Logits over an int8 cache, as a share of the largest; a key is off by up to 1/254 of the largest of its head."""
FAR = 2e-4
"""float32 sines at positions of a few thousand: the angle itself is rounded to 2^-12."""
GRADIENT = 3e-5
"""Gradients of attention: sums over a row or column of terms that are each within FLOAT32."""
PUBLISHED = 3e-4
"""Logits of about 30, after 30 layers in float32, against another library's in float32; 1.4e-4 was measured."""
