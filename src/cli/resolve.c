/* resolve.c: what a MODEL argument means: a path that exists, or org/name in the local Hugging Face cache, which keeps
 * it under HUB/models--ORG--NAME/{refs/main, snapshots/COMMIT/}. Nothing is downloaded. */
#include <ctype.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_HUBS = 5, MAX_COMMIT = 256 };

struct hubs {
    struct buf path[MAX_HUBS];
    int n;
};

static int hub_add(struct hubs *h, const char *base, const char *tail)
{
    if (!base || !*base) return OK;
    TRY(buf_appendf(&h->path[h->n], "%s%s", base, tail));
    for (int i = 0; i < h->n; i++)
        if (span_eq(buf_span(&h->path[i]), buf_span(&h->path[h->n]))) {
            buf_free(&h->path[h->n]);
            return OK;
        }
    h->n++;
    return OK;
}

/* The places where huggingface_hub keeps its cache, the most particular first. */
static int find_hubs(struct hubs *h)
{
    TRY(hub_add(h, getenv("HF_HUB_CACHE"), ""));
    TRY(hub_add(h, getenv("HUGGINGFACE_HUB_CACHE"), ""));
    TRY(hub_add(h, getenv("HF_HOME"), "/hub"));
    TRY(hub_add(h, getenv("XDG_CACHE_HOME"), "/huggingface/hub"));
    return hub_add(h, getenv("HOME"), "/.cache/huggingface/hub");
}

/* "org/name": one slash, and nothing that is more than a name. */
static bool is_repo(const char *s)
{
    const char *slash = strchr(s, '/');
    if (!slash || slash == s || !slash[1] || s[0] == '.' || slash[1] == '.') return false;
    for (const char *p = s; *p; p++)
        if (p != slash && !isalnum((unsigned char)*p) && !strchr("-_.", *p)) return false;
    return true;
}

/* The commit that refs/main names; without that file, the only snapshot there is. False if neither is there. */
static bool find_commit(const char *repo, char commit[MAX_COMMIT])
{
    struct buf path = {0}, text = {0};
    int n = 0;
    bool found = false;
    if (buf_appendf(&path, "%s/refs/main", repo) == OK && file_read(&text, path.data, MAX_COMMIT - 1, NULL) == OK &&
        text.len) {
        snprintf(commit, MAX_COMMIT, "%s", text.data);
        commit[strcspn(commit, " \r\n")] = 0;
        found = commit[0] && !strchr(commit, '/') && commit[0] != '.';
    }
    buf_free(&text);
    buf_free(&path);
    if (found) return true;
    if (buf_appendf(&path, "%s/snapshots", repo) < 0) return false;
    DIR *d = opendir(path.data);
    for (struct dirent *it; d && (it = readdir(d));)
        if (it->d_name[0] != '.') {
            snprintf(commit, MAX_COMMIT, "%s", it->d_name);
            n++;
        }
    if (d) closedir(d);
    buf_free(&path);
    return n == 1;
}

/* True for the file that stands for a model: any GGUF, but only the first part of a split one. */
static bool is_model_file(const char *name)
{
    size_t len = strlen(name);
    const char *of = strstr(name, "-of-");
    if (len < 6 || strcmp(name + len - 5, ".gguf") != 0) return false;
    return !of || of - name < 6 || !strncmp(of - 6, "-00001", 6);
}

/* Inside a snapshot: the directory itself if it is a checkpoint, or its one GGUF file. */
static int pick_in_snapshot(struct buf *path, const char *dir, const char *model, struct err *e)
{
    struct buf config = {0}, names = {0};
    int n = 0, rc = buf_appendf(&config, "%s/config.json", dir);
    bool checkpoint = rc == OK && file_exists(config.data);
    DIR *d = rc == OK && !checkpoint ? opendir(dir) : NULL;
    buf_free(&config);
    if (checkpoint) return buf_appendf(path, "%s", dir);
    for (struct dirent *it; d && rc == OK && (it = readdir(d));) {
        if (!is_model_file(it->d_name)) continue;
        if (!n++) rc = buf_appendf(path, "%s/%s", dir, it->d_name);
        if (rc == OK) rc = buf_appendf(&names, " %s", it->d_name);
    }
    if (d) closedir(d);
    if (rc == OK && n > 1)
        rc = err_set(e, ERR_INPUT, "%s: %d GGUF files are in %s, give the path of one:%s", model, n, dir, names.data);
    if (rc == OK && n == 0)
        rc = err_set(e, ERR_INPUT, "%s: %s holds neither config.json nor a GGUF file: download it again", model, dir);
    buf_free(&names);
    return rc;
}

/* 1 if the hub holds the model (*path is set), 0 if not. */
static int look_in_hub(struct buf *path, const char *hub, const char *model, struct err *e)
{
    struct buf repo = {0};
    char commit[MAX_COMMIT];
    const char *slash = strchr(model, '/');
    int rc = buf_appendf(&repo, "%s/models--%.*s--%s", hub, (int)(slash - model), model, slash + 1);
    if (rc == OK && file_is_dir(repo.data) && find_commit(repo.data, commit)) {
        rc = buf_appendf(&repo, "/snapshots/%s", commit);
        if (rc == OK && file_is_dir(repo.data)) rc = pick_in_snapshot(path, repo.data, model, e) < 0 ? e->code : 1;
    }
    buf_free(&repo);
    return rc;
}

static int not_found(const struct hubs *h, const char *model, struct err *e)
{
    struct buf places = {0};
    for (int i = 0; i < h->n; i++) TRY(buf_appendf(&places, "%s%s", i ? ", " : "", h->path[i].data));
    err_set(
        e, ERR_INPUT,
        "%s: no such file or directory, and not in the Hugging Face cache (looked in %s): give the path of a GGUF "
        "file or of a checkpoint directory, or download it there first, with: hf download %s",
        model, places.len ? places.data : "no place: HOME is not set", model);
    buf_free(&places);
    return e->code;
}

int resolve_model(struct buf *path, const char *model, struct err *e)
{
    struct hubs h = {0};
    int rc = OK;
    if (file_exists(model) || file_is_dir(model)) return buf_appendf(path, "%s", model);
    if (!is_repo(model))
        return err_set(e, ERR_INPUT,
                       "%s: no such file or directory; MODEL is a GGUF file, a checkpoint directory, or org/name in "
                       "the local Hugging Face cache",
                       model);
    if (find_hubs(&h) < 0) rc = err_set(e, ERR_NOMEM, "out of memory for a path");
    for (int i = 0; i < h.n && rc == OK; i++) rc = look_in_hub(path, h.path[i].data, model, e);
    if (rc == OK) rc = not_found(&h, model, e);
    for (int i = 0; i < MAX_HUBS; i++) buf_free(&h.path[i]);
    return rc < 0 ? rc : OK;
}
