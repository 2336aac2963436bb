"""The guard as a server with OpenAI's protocol. Needs the extra `serve`.

scheduler     one thread owns a model; requests queue for it
protocol      what clients send, checked; translated into the records of the house
completions   what clients get: whole answers and streams, each with its verdict
service       models, policies and targets: drafts are made, the guard decides
gateway       LiteLLM's generic guardrail API
tracing       verdicts as OpenTelemetry's evaluation events
unguarded     routes of an upstream that the operator lets through as they are
app           routes, errors, keys and limits
settings      what a server is told, whoever starts it
assembly      from settings to a server: models, policies, log, application
"""
