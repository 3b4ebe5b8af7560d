/* tiny_model: writes a small Llama checkpoint with seeded random weights into a fresh directory, for tests that need a
 * model and no file of the tree. F32 safetensors; D 64, 3 layers, 4 heads over 2 KV heads of 16, F 96, V 128. */
#ifndef TINY_MODEL_H
#define TINY_MODEL_H

enum { TINY_VOCAB = 128, TINY_LAYERS = 3 };

/* Writes config.json and model.safetensors under a new directory in $TMPDIR or /tmp; its path goes to dir[64]. Ends the
 * program if it cannot. tiny_model_remove deletes it. */
void tiny_model_write(char dir[64]);
void tiny_model_remove(const char *dir);

#endif
