"""GGUF files into MLX checkpoint directories, for `spec convert`.

Nothing is loaded whole, nothing is quantised again.

`container` reads the file's header, `blocks` its tensor types, `families` says what each architecture's names and
sizes mean, `vocabulary` makes the tokenizer, `writer` streams safetensors, `convert` puts them together.
"""
