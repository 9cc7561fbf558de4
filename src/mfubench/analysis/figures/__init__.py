"""One module a figure: `draw(found, theme)` returns it, `main(argv)` writes it as PNG.

Every figure names unit, convention, machine and n, uses colours that the colour-blind tell apart and that differ in
grey too, and draws an empty panel with the reason where a study has nothing to show.
"""
