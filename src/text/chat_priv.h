/* chat_priv: the shipped templates. */
#ifndef HEARTH_CHAT_PRIV_H
#define HEARTH_CHAT_PRIV_H

struct chat_template {
    const char *name, *source;
};
extern const struct chat_template chat_templates[]; /* ended by a NULL name */

#endif
