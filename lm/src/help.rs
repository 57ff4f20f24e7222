//! The texts of the help.

pub(crate) const ABOUT: &str = "\
Writes on from a prompt with a language model that is cut over ranks, or trains it on a text

Takes a folder as the Hub has it (config.json, tokenizer.json and model.safetensors, in one file or several with an
index), or a GGUF file, whose weights stay quantized. The families, from Llama and Qwen to DeepSeek, are in docs/models.md. Each rank
reads its own part of the weights and no more.
Without a model a small random one is made, which shows that everything works and writes nonsense.

The text is the same on any number of ranks for a seed, as far as rounding goes; so are the losses of a training, which
may stop and go on on other ranks.";

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin lm -- generate --tp 2 --prompt \"Once\"
      Nonsense of a small random model, from two ranks.
  cargo run --release --bin lm -- generate --model ./Llama-3.2-1B --tp 2 --prompt \"The capital of France is\" --temperature 0
      A model of your own.
  cargo run --release --bin lm -- generate --model ./SmolLM2-135M-Instruct.Q4_1.gguf --tp 2 --prompt \"Once\"
      A quantized model, each rank with the blocks of its part.
  cargo run --release --bin lm -- generate --ep 2 --prompt \"Once\"
      Nonsense of a small random mixture, whose experts are distributed over two ranks.
  cargo run --release --bin lm -- score --model ./Llama-3.2-1B --tp 2 --text book.txt
      How likely the model finds a text.
  cargo run --release --bin lm -- generate --model ./Llama-3.2-1B --tp 2 --prompts prompts.txt --batch 8 --json texts.jsonl
      Each line of a file, eight at a time.
  cargo run --release --bin lm -- generate --model ./SmolLM2-135M-Instruct.Q4_1.gguf --tp 2 --chat
      A conversation with a model that was trained for it; each line is a message.
  cargo run --release --bin lm -- serve --model ./SmolLM2-135M-Instruct.Q4_1.gguf --tp 2
      A server of the OpenAI API at http://127.0.0.1:8080, with a page to chat with.
  cargo run --release --bin lm -- bench-serve --base-url http://127.0.0.1:8080 --request-rate 4 --num-prompts 200
      What clients of a server see when four requests come in a second.
  git log -1 --format=%B | cargo run --release --bin lm -- generate --model ./Llama-3.2-1B
      The prompt from a pipe.
  cargo build --release --features mpi && mpirun -n 2 target/release/lm generate --tp 2 --backend mpi
      On 2 processes, of which the first shows the text.
  cargo run --release --bin lm -- export --model ./Llama-3.2-1B --gguf q8_0 --out Llama-3.2-1B.gguf
      A GGUF file for this program and llama.cpp.
  cargo run --release --bin lm -- train --train book.txt --dp 2 --tp 1 --save ./learned
      Train the small random model on a text of your own, on two replicas.
  cargo run --release --bin lm -- train --train book.txt --resume ./learned --save ./learned --steps 200 --pp 2 --tp 1
      Go on with that, on a pipeline of two stages.
  cargo run --release --bin lm -- train --data chats.jsonl --model ./SmolLM2-135M-Instruct --seq-len 1024 --save ./learned
      Learn the replies of conversations, one JSON object per line: {\"messages\": [{\"role\": .., \"content\": ..}, ..]}.
  cargo run --release --bin lm -- generate --model ./learned/step-00000200 --prompt \"Once\"
      Write with what was learned.

Exit status: 0 if all went well, also if a signal has stopped a training after a step or a server after its requests, 1 if the model could not be read or run, 2 if the command line cannot work.";
