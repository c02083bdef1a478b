"""SGLang's offline engine behind our door: for what the native engine does not do, and to compare the two.

recipe.py makes its flags, package.py finds and checks the package, results.py reads what it sends, engine.py runs it.
"""
