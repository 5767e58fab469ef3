"""How users begin what they ask: a model is given a few words, and writes the rest of the request itself.

A chat model has learnt what requests look like, so no data set is needed to make it talk about all that it knows; see
Xu et al. 2024, Magpie (arXiv:2406.08464), where it is given nothing at all.
"""

OPENINGS: tuple[str, ...] = (
    *[""] * 24,
    *("What", "What is", "What are the", "How", "How do I", "How does", "Why", "Who", "When did", "Where", "Which"),
    *("Can you", "Could you explain", "Is it", "Are there", "I", "I am", "I want to", "My", "The", "In", "If"),
    *("Explain", "Describe", "Compare", "List", "Give me", "Tell me about", "Define", "Discuss", "Suggest", "Outline"),
    *("Write a short story about", "Write a poem about", "Write an essay on", "Write a letter to", "Write an email"),
    *("Write a blog post about", "Compose", "Draft a speech", "Create a plan for", "Design", "Develop", "Imagine"),
    *("You are", "Pretend to be", "Act as", "Take the role of", "Suppose", "Picture yourself as"),
    *("Write a Python function that", "Write a function to", "Write a program that", "Implement", "Fix this code:\n\n"),
    *("Complete the code:\n\ndef ", "What does this code do?\n\n```python\n", "Write a SQL query", "Write HTML for"),
    *("Solve", "Calculate", "Find the", "A train", "There are", "John has", "Mary bought", "If a", "A store sells"),
    *("Given that f(x) =", "What is the probability", "Prove that", "The sum of", "How many"),
    *("Summarize the following text:\n\n", "Summarize: ", "Summarize this article in three sentences.\n\n"),
    *("Summarize: ", "Summarize: The", "Read the text and answer the question.\n\n", "Rewrite the following:\n\n"),
    *("Extract the names from this text:\n\n", "Classify the following reviews:\n\n", "Correct the grammar:\n\n"),
    *("Translate to English:", "Based on the passage below, ", "Identify", "Analyze the data:\n\n", "Evaluate the"),
)
