"""The guard as a server with OpenAI's protocol. Needs the extra `serve`.

settings      the settings of a server, however it is started
assembly      from settings to a server: models, policies, log, application
hosting       where it listens, and who may call it there
gate          keys, hosts and the number of requests
app           routes, pages, the decision log over HTTP, and errors
protocol      requests, checked, and translated into the records of the engine; those that another server answers
errors        errors as they leave, in the client's own words
service       models, policies and targets: drafts are made, the guard decides
scheduler     requests to one model, their scored drafts, and their queue
remote        another server, and the form of its answers
upstream      another server that writes drafts, or answers instead
answers       answers and verdicts as they leave, and a client's cuts of them
completions   answers in OpenAI's form, each with its verdict, whole or as server-sent events
responses, text_completions   other protocols of OpenAI's, as chat completions
in_vllm       the guard inside `vllm serve`
"""
