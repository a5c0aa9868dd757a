"""Names of the measures of similarity and of their settings; without importing torch."""

#: Settings of each measure, by its name.
MEASURES = {
    "group": ("group", "live", "center"),
    "orthogonal": ("center",),
    **dict.fromkeys(("cka_linear", "cka_max", "cka_laplace"), ("estimator", "normalize", "bandwidth")),
}
