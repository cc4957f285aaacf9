"""HTTP serving on the governed dispatcher: OpenAI API, metrics, health, one lake row a request.

Needs the extra `serve`. `python -m attention serve --help` starts one instance; several instances
stand behind the router of a release.
"""
